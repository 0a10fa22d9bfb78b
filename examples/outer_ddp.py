"""Two clusters, each with DistributedDataParallel inside, train one model together.

    python examples/outer_ddp.py

starts a parameter server in this process and two clusters as torchrun would start them: one of two processes, one of
one. On real machines each cluster runs this file itself, under `spantrain outer run`:

    spantrain outer run CONFIG --cluster a -- torchrun --nproc-per-node 8 examples/outer_ddp.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from spantrain import LocalParameterServer, OuterOptimizer

STEPS, INNER_STEPS, BATCH = 96, 16, 32
PROCESSES = {"a": 2, "b": 1}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of handwritten digits, and what they show."""
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    return images.float() / 16.0, labels.long()


def train(cluster: str) -> None:
    """Train as one of a cluster's processes: every one of them makes an outer optimizer and calls `step`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)))
    images, labels = digits()
    chance = torch.Generator().manual_seed(100 * ord(cluster[0]) + rank)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with OuterOptimizer.from_environment(model.named_parameters(), inner_steps=INNER_STEPS) as outer:
        for step in range(1, STEPS + 1):
            chosen = torch.randint(len(labels), (BATCH // size,), generator=chance)
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            inner.zero_grad()
            loss.backward()
            inner.step()
            outer.step(tokens=len(chosen))
            if rank == 0 and (step % 32 == 0 or step == 1):
                print(f"cluster {cluster}  step {step:3}  loss {loss:.3f}  version {outer.metrics.version}", flush=True)
        outer.finish(30.0)
        if rank == 0:
            with torch.no_grad():
                whole = functional.cross_entropy(model.module(images), labels)
            print(f"cluster {cluster}  ends with loss {whole:.3f}, version {outer.metrics.version}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start a server and two clusters."""
    with LocalParameterServer() as server:
        joining = {"SPANTRAIN_OUTER_MASTER": server.address, "SPANTRAIN_OUTER_TOKEN": server.token}
        clusters = []
        for name, count in PROCESSES.items():
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            variables = {**os.environ, **joining, "SPANTRAIN_OUTER_CLUSTER": name, "OMP_NUM_THREADS": "1"}
            clusters.append(subprocess.Popen([*torchrun, __file__], env=variables))
        failed = [cluster for cluster in clusters if cluster.wait()]
        told = ", ".join(f"{one.name}: {one.tokens} samples" for one in server.status().clusters)
        print(f"the master counted {told}; version {server.status().version}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if "SPANTRAIN_OUTER_CLUSTER" in os.environ:
        train(os.environ["SPANTRAIN_OUTER_CLUSTER"])
    else:
        main()
