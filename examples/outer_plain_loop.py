"""Two clusters of unequal speed train one model together, and neither waits for the other.

    python examples/outer_plain_loop.py

Each cluster is an ordinary training loop with two lines more, in a process of its own; the parameter server runs in
this one. On real machines `spantrain outer up` starts the server, and each cluster runs this file with
`spantrain outer run CONFIG --cluster NAME -- python examples/outer_plain_loop.py`.
"""

import multiprocessing
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from spantrain import LocalParameterServer, OuterOptimizer, OuterOptions

STEPS, INNER_STEPS, BATCH = 160, 16, 32
SLOWER_S = {"a": 0.0, "b": 0.01}
"""What a step takes longer in each cluster: emulated, the rest is real."""


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of handwritten digits, and what they show."""
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    return images.float() / 16.0, labels.long()


def train(outer: OuterOptimizer, model: nn.Module, cluster: str) -> None:
    """Train on random samples; every cluster draws others."""
    images, labels = digits()
    chance = torch.Generator().manual_seed(sum(cluster.encode()))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, STEPS + 1):
        chosen = torch.randint(len(labels), (BATCH,), generator=chance)
        loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
        inner.zero_grad()
        loss.backward()
        inner.step()
        outer.step(tokens=BATCH)  # the first of the two lines: counts, pushes now and then, takes what has come
        time.sleep(SLOWER_S.get(cluster, 0.0))
        if step % 40 == 0 or step == 1:
            print(f"cluster {cluster}  step {step:3}  loss {loss:.3f}  version {outer.metrics.version}", flush=True)
    outer.finish(30.0)
    with torch.no_grad():
        whole = functional.cross_entropy(model(images), labels)
    told = outer.metrics
    print(
        f"cluster {cluster}  ends with loss {whole:.3f} over all data: version {told.version}, {told.outer_rounds} "
        f"rounds, {told.blocked_s:.2f} of {told.train_s + told.blocked_s:.2f} s in the outer optimizer",
        flush=True,
    )


def model_of(seed: int) -> nn.Module:
    """Return a small model; clusters that come later begin from the first one's parameters, whatever the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))


def one_cluster(cluster: str, address: str, token: str) -> None:
    """Join, and train."""
    torch.set_num_threads(1)
    model = model_of(seed=0)
    with OuterOptimizer(  # the second line
        model.named_parameters(), master=address, token=token, cluster=cluster, inner_steps=INNER_STEPS,
        options=OuterOptions(wait_for_start_s=30.0),
    ) as outer:  # fmt: skip
        train(outer, model, cluster)


def main() -> None:
    """Be one cluster, if `spantrain outer run` says so; else start a server and two clusters."""
    if "SPANTRAIN_OUTER_MASTER" in os.environ:
        model = model_of(seed=0)
        with OuterOptimizer.from_environment(model.named_parameters()) as outer:
            train(outer, model, os.environ["SPANTRAIN_OUTER_CLUSTER"])
        return
    started = multiprocessing.get_context("spawn")
    with LocalParameterServer() as server:
        clusters = [started.Process(target=one_cluster, args=(name, server.address, server.token)) for name in SLOWER_S]
        for process in clusters:
            process.start()
        for process in clusters:
            process.join()
        print(f"the master counted {sum(one.tokens for one in server.status().clusters)} samples of both")


if __name__ == "__main__":
    main()
