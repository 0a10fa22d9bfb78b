"""Two clusters train one model together: SpanTrain's own pipeline over two devices, and a plain loop.

    python examples/outer_spantrain.py

The pipeline is `spantrain train`, with nothing more to say: started by `spantrain outer run` it is a cluster, and the
first device of each stage sends and gets that stage's layers itself. The plain loop has the whole model. This file
plans, starts a parameter server and both clusters on this machine; on real ones these are

    spantrain outer up outer.yaml
    spantrain outer run outer.yaml --cluster pipeline -- spantrain train plan.json --out run \\
        --function examples/outer_spantrain.py:build --function examples/outer_spantrain.py:samples
    spantrain outer run outer.yaml --cluster plain -- python examples/outer_spantrain.py
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from spantrain import LocalParameterServer, OuterOptimizer

STEPS, INNER_STEPS, BATCH, WIDTH = 96, 16, 32, 96
SLOWER_S = 0.1
"""What a step of the plain loop takes longer: emulated, so that it still trains when the pipeline has started."""


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], object]:
    """Return the model, an example batch and the loss: what `spantrain train --model FILE:FUNCTION` wants."""
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(nn.Linear(64, WIDTH), nn.GELU()), *inner, nn.Linear(WIDTH, 10))
    return model, (torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64)), functional.cross_entropy


def samples() -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
    """Return images of handwritten digits, and what they show."""
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    return torch.utils.data.TensorDataset(images.float() / 16.0, labels.long())


def train_plainly() -> None:
    """Train the whole model in one process, as a cluster of its own."""
    model, _, _ = build()
    images, labels = samples()[:]
    chance = torch.Generator().manual_seed(1)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with OuterOptimizer.from_environment(model.named_parameters(), inner_steps=INNER_STEPS) as outer:
        for step in range(1, STEPS + 1):
            chosen = torch.randint(len(labels), (BATCH,), generator=chance)
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            inner.zero_grad()
            loss.backward()
            inner.step()
            outer.step(tokens=BATCH)
            time.sleep(SLOWER_S)
            if step % 32 == 0 or step == 1:
                print(f"plain loop: step {step:3}  loss {loss:.3f}  version {outer.metrics.version}", flush=True)
        outer.finish(30.0)
        print(f"plain loop: ends with version {outer.metrics.version}", flush=True)


def main() -> None:
    """Plan for two devices, start a server and both clusters."""
    spantrain, this = [sys.executable, "-m", "spantrain"], Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as folder, LocalParameterServer() as server:
        plan = str(Path(folder) / "plan.json")
        model = ["--model", f"{this}:build", "--data", f"{this}:samples", "--global-batch", str(BATCH)]
        cluster = ["--cluster", str(this.with_name("one-machine.yaml"))]
        # As equal stages; without --strategy it would be found out what pays, one device perhaps.
        subprocess.run([*spantrain, "plan", *cluster, *model, "--strategy", "gpipe", "--out", plan], check=True)
        joining = {"SPANTRAIN_OUTER_MASTER": server.address, "SPANTRAIN_OUTER_TOKEN": server.token}
        joining["SPANTRAIN_OUTER_INNER_STEPS"] = str(INNER_STEPS)
        own = ["--function", f"{this}:build", "--function", f"{this}:samples"]  # which the plan's names may call
        train = [*spantrain, "train", plan, *own, "--steps", str(STEPS), "--out", str(Path(folder) / "run")]
        clusters = [
            subprocess.Popen(command, env={**os.environ, **joining, "SPANTRAIN_OUTER_CLUSTER": name})
            for name, command in (("pipeline", train), ("plain", [sys.executable, str(this)]))
        ]
        failed = [one for one in clusters if one.wait()]
        told = ", ".join(f"{one.name}: {one.tokens} samples" for one in server.status().clusters)
        print(f"the master counted {told}; version {server.status().version}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if "SPANTRAIN_OUTER_CLUSTER" in os.environ:
        train_plainly()
    else:
        main()
