"""Print what replicas gain and lose that divide the optimizer's state, gradients and parameters, beside torch's.

    python benchmarks/sharded_state.py [--runs 3] [--steps 12] [--replicas 2] [--save]

A stack of GPT-2 blocks, whole on each device, with AdamW in float32, in turns in one run of this script:

plain        our replicas, each with all state
zero1        ours, with the optimizer's state divided (`runtime.gradients.own_rows`)
zero2        gradients, too (`runtime.gradients.unit_shards`): summed for every micro-batch
zero3        parameters, too: gathered for every forward and backward
ddp          DistributedDataParallel, a bucket of 25 MiB and gradients that are views of it
ddp + zero   the same with ZeroRedundancyOptimizer, which gives each rank whole parameters to update; they are views of
             one buffer for each rank, which is broadcast once
fsdp2        `fully_shard` of each block and of the rest, whose parameters stay whole from forward to backward (`fsdp2
             zero2`) or do not; sums for every micro-batch. Its parts are updated as plain tensors: AdamW on DTensors
             takes a processor far longer

`times` is a step over plain's, ours, and over ddp's, torch's: medians over runs of the median step. `state` is what the
fullest device has of parameters, gradients and optimizer state: of torch's as counted between steps, of ours the memory
model's, with what units at work have whole.
`held` is the most bytes of tensors that ours held at once, and `forecast` the model's for it at the plan's limits, with
what operations need besides, which is not in `held`. `off` is the last loss, over one device's, less one.

Real: processes on processors with one thread each, computation, gradients, Gloo over loopback. Emulated: nothing. A
machine with fewer cores than replicas says nothing about seconds.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from results import save
from spantrain.app.profiling.describe import described_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.shares import StateSharding
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.cost.memory import MemoryCost, framework_bytes
from spantrain.models.build import build_units
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import loss_of, rows_read, shared_parameters
from spantrain.runtime.step.work import SampledFeed

BATCH, MICRO_BATCH = 16, 8
JOB = TrainJob(steps=12, seed=5, learning_rate=1e-3, warmup_steps=0, adapter="off", max_grad_norm=None)
WARM_UP = 3
OURS = {
    "plain": StateSharding.NONE,
    "zero1": StateSharding.ZERO1,
    "zero2": StateSharding.ZERO2,
    "zero3": StateSharding.ZERO3,
}
TORCHS = ("ddp", "ddp + zero", "fsdp2 zero2", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of one run."""

    step_s: float
    loss: float
    state_bytes: int
    held_bytes: int | None = None
    forecast_bytes: int | None = None


def main() -> None:
    """Run all in turns, print the table."""
    options = _options()
    if options.worker is not None:
        _torch_worker(json.loads(options.worker))
        return
    model, job = _model(), replace(JOB, steps=options.steps)
    names = [f"replica-{number}" for number in range(options.replicas)]
    cluster, found = _cluster(names), {name: list[Run]() for name in (*OURS, *TORCHS)}
    profile = described_profile(cluster, model)
    plans = {name: _plan(cluster, model, len(profile.graph.units), names, sharding) for name, sharding in OURS.items()}
    memory = MemoryCost(profile, job.optimizer_state)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.runs):
            for name, plan in plans.items():
                found[name].append(_ours(profile, memory, plan, job, Path(folder) / f"{name}-{number}"))
            for name in TORCHS:
                found[name].append(_torchs(options.replicas, job.steps, name))
            print(f"run {number + 1}: " + ", ".join(f"{name} {rows[-1].step_s:.3f} s" for name, rows in found.items()))
    _report(found, _one_device(model, job), options)


def _ours(profile: Profile, memory: MemoryCost, plan: Plan, job: TrainJob, out: Path) -> Run:
    request = TrainRequest(plan=plan, profile=profile, profile_path="", job=job, out=out, checkpoints=False)
    settings, shown = SessionOptions(network=False), SilentReporter()
    with open_session(plan.cluster, plan.devices, settings, out / "logs", shown) as session:
        outcome = train(session, request, StopRequest(), shown)
    always = [sizes.always for sizes in memory.plan_held_sizes(plan).values()]
    return Run(
        step_s=outcome.step_s_measured,
        state_bytes=max(one.parameter_bytes + one.gradient_bytes + one.optimizer_bytes for one in always),
        held_bytes=max(one.peak_bytes or 0 for one in outcome.devices.values()),
        forecast_bytes=max(memory.plan_peak_bytes(plan).values()) - framework_bytes("cpu"),
        loss=outcome.losses[-1],
    )


def _report(found: dict[str, list[Run]], one_loss: float, options: argparse.Namespace) -> None:
    table = [f"{'':12} {'a step':>9} {'times':>7} {'state':>10} {'held':>10} {'forecast':>10} {'off':>9}"]
    data: dict[str, Any] = {"replicas": options.replicas, "runs": options.runs, "steps": options.steps, "rows": {}}
    for name, rows in found.items():
        base = found["plain" if name in OURS else "ddp"]
        last = rows[-1]
        row = {
            "step_s": statistics.median(run.step_s for run in rows),
            "times": statistics.median(run.step_s / other.step_s for run, other in zip(rows, base, strict=True)),
            "state_bytes": last.state_bytes,
            "held_bytes": last.held_bytes,
            "forecast_bytes": last.forecast_bytes,
            "off": last.loss / one_loss - 1,
        }
        sizes = " ".join(
            f"{'' if size is None else f'{size / 2**20:.1f} MiB':>10}"
            for size in (last.state_bytes, last.held_bytes, last.forecast_bytes)
        )
        table.append(f"{name:12} {row['step_s']:7.3f} s {row['times']:7.3f} {sizes} {row['off']:9.1e}")
        data["rows"][name] = row
    print("\n".join(table))
    if options.save:
        save("sharded_state", table, data)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=JOB.steps)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _model() -> ModelSpec:
    spec = resolve_model("gpt2-tiny")
    config = {**spec.config, "n_layer": 6, "n_embd": 256, "n_head": 8}
    return replace(spec, name="six GPT-2 blocks", config=config)


def _cluster(names: Sequence[str]) -> Cluster:
    kind = DeviceKind(
        name="core", peak_fp16_flop_per_s=2e10, peak_fp32_flop_per_s=2e10, memory_bytes=2**33,
        memory_bandwidth_bytes_per_s=1e10, power_w=10.0, source="one core of this machine",
    )  # fmt: skip
    return Cluster(
        name="this machine",
        kinds=(kind,),
        sites=(Site(name="here", hosts=("one",), bandwidth_bytes_per_s=1e9, latency_s=1e-4),),
        hosts=(Host(name="one", site="here", devices=tuple(names)),),
        devices=tuple(
            Device(name=name, kind="core", host="one", site="here", backend="cpu", memory_bytes=2**33) for name in names
        ),
        links=(),
    )


def _plan(cluster: Cluster, model: ModelSpec, units: int, names: Sequence[str], sharding: StateSharding) -> Plan:
    stage = Stage(
        first_unit=0,
        end_unit=units,
        replicas=tuple(Replica(devices=(name,), sample_share=1.0, in_flight_limit=MICRO_BATCH) for name in names),
        micro_batches=equal_spans(BATCH, MICRO_BATCH),
        state_sharding=sharding,
    )
    return Plan(
        cluster=cluster, model=model, global_batch=BATCH, dtype="float32", stages=(stage,), schedule="1f1b",
        generation=1,
    )  # fmt: skip


def _one_device(model: ModelSpec, job: TrainJob) -> float:
    """Return the last loss of a plain loop."""
    torch.set_num_threads(1)
    units = build_units(model, seed=job.seed)
    parameters = {id(own): own for unit in units for own in unit.parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), **_adamw(job))
    feed, loss = _feed(model, job), torch.zeros(())
    for step in range(job.steps):
        optimizer.zero_grad()
        loss = loss_of(units, feed.rows(step, Span(0, BATCH), rows_read(units))) / BATCH
        torch.autograd.backward(loss)
        _set_rate(optimizer, job, step)
        optimizer.step()
    return float(loss.detach())


def _feed(model: ModelSpec, job: TrainJob) -> SampledFeed:
    return SampledFeed(open_dataset(model), global_batch=BATCH, seed=job.order_seed)


def _adamw(job: TrainJob) -> dict[str, Any]:
    betas = (job.adam_beta1, job.adam_beta2)
    return {"lr": job.learning_rate, "betas": betas, "eps": job.adam_epsilon, "weight_decay": job.weight_decay}


def _set_rate(optimizer: torch.optim.Optimizer, job: TrainJob, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = job.learning_rate * job.rate_factor(step)


def _torchs(replicas: int, steps: int, way: str) -> Run:
    """Run torch's side, a process for each replica."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    orders = [
        json.dumps({"rank": rank, "size": replicas, "port": port, "steps": steps, "way": way})
        for rank in range(replicas)
    ]
    argv = [sys.executable, str(Path(__file__)), "--worker"]
    processes = [
        subprocess.Popen([*argv, order], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for order in orders
    ]
    said = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return Run(
        step_s=max(one["step_s"] for one in said),
        state_bytes=max(one["state_bytes"] for one in said),
        loss=sum(one["loss"] for one in said),
    )


class _Chain(torch.nn.Module):
    def __init__(self, units: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.units = torch.nn.ModuleList(units)

    def forward(self, rows: Any) -> torch.Tensor:
        return loss_of(list(self.units), rows)  # type: ignore[arg-type]


def _torch_worker(order: dict[str, Any]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = order["rank"], order["size"]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{order['port']}", rank=rank, world_size=size)
    model, job = _model(), replace(JOB, steps=order["steps"])
    units = build_units(model, seed=job.seed)
    side = (_Fsdp if order["way"].startswith("fsdp2") else _Ddp)(units, job, order["way"])
    feed, seconds, total = _feed(model, job), [], 0.0
    for step in range(job.steps):
        dist.barrier()
        begun_s, total = time.monotonic(), 0.0
        spans = [Span(lo + rank * MICRO_BATCH // size, lo + (rank + 1) * MICRO_BATCH // size)
                 for lo in range(0, BATCH, MICRO_BATCH)]  # fmt: skip
        for number, span in enumerate(spans):
            side.begin(is_last=number == len(spans) - 1)
            loss = side.module(feed.rows(step, span, rows_read(units))) / BATCH
            torch.autograd.backward(loss * size)  # its sum is a mean
            total += float(loss.detach())
        _set_rate(side.optimizer, job, step)
        side.update()
        seconds.append(time.monotonic() - begun_s)
    said = {"step_s": statistics.median(seconds[WARM_UP:]), "state_bytes": side.state_bytes, "loss": total}
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()


class _Ddp:
    """DistributedDataParallel, and ZeroRedundancyOptimizer if asked for."""

    def __init__(self, units: Sequence[torch.nn.Module], job: TrainJob, way: str) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        self.module = DistributedDataParallel(_Chain(units), gradient_as_bucket_view=True)
        self.optimizer: torch.optim.Optimizer
        if way == "ddp":
            self._inner = self.optimizer = torch.optim.AdamW(self.module.parameters(), **_adamw(job))
            return
        self.optimizer = ZeroRedundancyOptimizer(
            self.module.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **_adamw(job)
        )
        self._inner = self.optimizer.optim

    def begin(self, *, is_last: bool) -> None:
        self.module.require_backward_grad_sync = is_last

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state_bytes(self) -> int:
        parameters = {id(own): own.nbytes for own in self.module.parameters()}
        return 2 * sum(parameters.values()) + _state_bytes(self._inner)


class _Fsdp:
    """`fully_shard`, each unit that shares no parameter a group."""

    def __init__(self, units: Sequence[Any], job: TrainJob, way: str) -> None:
        from torch.distributed.fsdp import fully_shard

        self.module = _Chain(units)
        again = way == "fsdp2"
        tied = {position for members in shared_parameters(units).values() for position, _ in members}
        for position, unit in enumerate(units):
            if position not in tied:
                fully_shard(unit, reshard_after_forward=again)
        fully_shard(self.module, reshard_after_forward=again)
        self._sharded = list(self.module.parameters())
        self._own = [torch.nn.Parameter(one.to_local().detach()) for one in self._sharded]  # type: ignore[attr-defined]
        self.optimizer = torch.optim.AdamW(self._own, **_adamw(job))
        whole = sum(one.numel() * one.element_size() for one in self._sharded)
        self._held = sum(one.nbytes for one in self._own) if again else whole

    def begin(self, *, is_last: bool) -> None:
        """Do nothing: every micro-batch's gradients are summed."""

    def update(self) -> None:
        for one, own in zip(self._sharded, self._own, strict=True):
            own.grad = None if one.grad is None else one.grad.to_local()  # type: ignore[attr-defined]
            one.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state_bytes(self) -> int:
        return self._held + sum(one.nbytes for one in self._own) + _state_bytes(self.optimizer)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    state = chain.from_iterable(one.values() for one in optimizer.state.values())
    return sum(one.nbytes for one in state if isinstance(one, torch.Tensor))


if __name__ == "__main__":
    main()
