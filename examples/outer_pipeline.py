"""Two clusters train one model together: one has it cut into a pipeline of two processes, the other whole.

    python examples/outer_pipeline.py

Each process of the pipeline gives the outer optimizer the parameters that it has, by the names that they have in the
whole model; how a cluster cuts it is nobody else's business. The pipeline is torch's own. This file starts a parameter
server and both clusters; on real machines each is started by `spantrain outer run CONFIG --cluster NAME -- torchrun`.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from spantrain import LocalParameterServer, OuterOptimizer

STEPS, INNER_STEPS, BATCH, MICRO_BATCHES, WIDTH = 96, 16, 32, 4, 96
PROCESSES = {"a": 2, "b": 1}


def layers() -> list[nn.Module]:
    """Return the whole model's layers, the same in every process."""
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
    return [nn.Sequential(nn.Linear(64, WIDTH), nn.GELU()), *inner, nn.Linear(WIDTH, 10)]


def train(cluster: str) -> None:
    """Train as one stage of a cluster's pipeline; a pipeline of one stage is the whole model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = layers()
    mine = range(rank * len(whole) // size, (rank + 1) * len(whole) // size)
    part = nn.Sequential(*(whole[index] for index in mine))
    named = [(f"{index}.{name}", one) for index in mine for name, one in whole[index].named_parameters()]
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=functional.cross_entropy)
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images, labels = images.float() / 16.0, labels.long()
    chance = torch.Generator().manual_seed(ord(cluster[0]))
    inner = torch.optim.AdamW(part.parameters(), lr=3e-3)
    with OuterOptimizer.from_environment(named, inner_steps=INNER_STEPS) as outer:
        for step in range(1, STEPS + 1):
            chosen = torch.randint(len(labels), (BATCH,), generator=chance)
            losses: list[torch.Tensor] = []
            inner.zero_grad()
            inputs = (images[chosen],) if rank == 0 else ()
            last = rank == size - 1
            schedule.step(*inputs, target=labels[chosen] if last else None, losses=losses if last else None)
            inner.step()
            # A sample counts once, whichever stages it went through.
            outer.step(tokens=BATCH if last else 0)
            if last and (step % 32 == 0 or step == 1):
                loss = torch.stack(losses).mean()
                print(f"cluster {cluster}  step {step:3}  loss {loss:.3f}  version {outer.metrics.version}", flush=True)
        outer.finish(30.0)
        if rank == 0:
            print(f"cluster {cluster}  ends with version {outer.metrics.version}", flush=True)
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
