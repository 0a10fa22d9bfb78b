"""What a checkpoint costs: `benchmarks/checkpoint.py [--model gpt2-mini] [--steps 30] [--every 5]`.

Saving: two real workers train; the step in which the snapshot is taken and the steps during which a thread writes are
compared with all others. The bound: training pauses less than one step for a save.

Loading: the newest checkpoint of that run, under the plan that saved it, each device with its own file on its own disk;
and under another one (other cut, one more device), where most of what a device needs lies on another disk and comes
over encrypted connections of the loopback. Every file's SHA-256 is checked before it is used.

Real: processes, messages, files, this machine's processors and disk (files are in its cache when they are loaded).
Emulated: nothing. All share one machine, so its load shows in every figure; medians, and the fastest of several loads.
"""

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from spantrain.app.profiling.describe import described_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.artefacts import write_profile
from spantrain.config.cluster_file import parse_cluster
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units, unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.runtime.channels import MailboxChannel
from spantrain.runtime.checkpoint.device_files import FilesToBeginWith
from spantrain.runtime.checkpoint.holding import Holding, holding_of
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest
from spantrain.runtime.checkpoint.saver import restore
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.runtime.gradients.optimizer import build_optimizer
from spantrain.runtime.redistribution.exchange import group_of
from spantrain.transport.mailbox.mailbox import Mailbox

CLUSTER = """\
name: here
sites:
  - name: here
    network: {bandwidth: 10 Gbit/s, latency: 0.05 ms}
    hosts:
      - {name: here, devices: {cpu: 3}}
"""
WARM_UP = 3
MIB = 2**20


class Steps(SilentReporter):
    """Keeps what each step was."""

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []

    def step(self, outcome: StepOutcome, _metrics: object, total_steps: int) -> None:
        """Keep one."""
        del total_steps
        self.outcomes.append(outcome)


def plan_of(cluster: Cluster, model: ModelSpec, edges: list[int], batch: int, generation: int) -> Plan:
    """A chain of stages between these units, one device each."""
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=(Replica(devices=(device.name,), sample_share=1.0, in_flight_limit=batch),),
            micro_batches=equal_spans(batch, max(1, batch // 4)),
        )
        for device, (first, end) in zip(cluster.devices, pairwise(edges), strict=False)
    )
    return Plan(
        cluster=cluster, model=model, global_batch=batch, dtype="float32", stages=stages, schedule="1f1b",
        generation=generation,
    )  # fmt: skip


def measure_saving(plan: Plan, job: TrainJob, folder: Path) -> bool:
    """Train with checkpoints now and then; print what they cost; say whether the bound holds."""
    profile = described_profile(plan.cluster, plan.model)
    write_profile(profile, folder / "profile.json")
    request = TrainRequest(
        plan=plan, profile=profile, profile_path=str(folder / "profile.json"), job=job, out=folder / "run",
    )  # fmt: skip
    listener = Steps()
    with open_session(plan.cluster, plan.devices, SessionOptions(network=False), folder / "logs", listener) as session:
        train(session, request, StopRequest(), listener)
    every = job.checkpoint_every
    counted = [outcome for outcome in listener.outcomes if outcome.loss is not None][WARM_UP:]
    # The snapshot is taken after the barrier of a step, so in the time of the next one; it is written then, too.
    after = [outcome.duration_s for outcome in counted if outcome.step % every == 0]
    second = [outcome.duration_s for outcome in counted if outcome.step % every == 1]
    others = [outcome.duration_s for outcome in counted if outcome.step % every > 1]
    step_s = statistics.median(others)
    stall_s = statistics.median(after) - step_s
    print(f"step without a save    median {step_s:.3f} s of {len(others)} ({min(others):.3f} to {max(others):.3f})")
    print(f"step after a snapshot  median {statistics.median(after):.3f} s of {len(after)} ({max(after):.3f} at most)")
    print(f"the one behind it      median {statistics.median(second):.3f} s of {len(second)}")
    holds = stall_s < step_s
    print(f"a save stalls training by {stall_s:.3f} s, {stall_s / step_s:.2f} of a step; bound 1: {_verdict(holds)}")
    return holds


def measure_loading(run: Path, plans: dict[str, Plan], job: TrainJob, folder: Path, repeats: int) -> None:
    """Load the newest checkpoint under each plan; print the fastest of several."""
    manifest = read_manifest(latest_checkpoint(run))
    size = sum(file.size_bytes for file in manifest.files.values())
    print(f"checkpoint             {size / MIB:.1f} MiB in {len(manifest.files)} files")
    assert manifest.plan is not None
    for name, plan in plans.items():
        disks = _disks(manifest, latest_checkpoint(run), plan, folder / name.replace(" ", "-"))
        found = [_load(manifest, plan, disks, job) for _ in range(repeats)]
        fastest_s, sent = min(found)
        print(
            f"load under {name:12} {fastest_s:.3f} s, {size / fastest_s / 1e9:.2f} GB/s, {sent / MIB:.1f} MiB of it "
            f"from other disks (of {repeats}: {', '.join(f'{seconds:.3f}' for seconds, _ in found)})"
        )


def _disks(manifest: Manifest, checkpoint: Path, plan: Plan, folder: Path) -> dict[str, Path]:
    """Give each device a folder of its own, with the file that it wrote."""
    disks = {}
    for device in plan.devices:
        disks[device] = folder / device
        disks[device].mkdir(parents=True)
        for name, file in manifest.files.items():
            if file.device == device:
                shutil.copy(checkpoint / name, disks[device] / name)
    return disks


def _load(manifest: Manifest, plan: Plan, disks: dict[str, Path], job: TrainJob) -> tuple[float, int]:
    """Return seconds from when all devices are built and connected, and bytes that were sent."""
    graph = build_graph(plan.model)
    boxes = {name: Mailbox(name=name) for name in plan.devices}
    for box in boxes.values():
        box.set_peers(plan.generation, [other.address for other in boxes.values()])
    parts = {name: _holding(plan, name, graph, job) for name in plan.devices}

    def load(name: str) -> None:
        holding, optimizer = parts[name]
        post = MailboxChannel(boxes[name], generation=plan.generation, step=manifest.step)
        files = FilesToBeginWith(disks[name], manifest.files)
        restore(files, holding, optimizer, group_of(plan.cluster, name, plan.devices), post)

    start_s = time.perf_counter()
    with ThreadPoolExecutor(len(boxes)) as pool:
        for future in [pool.submit(load, name) for name in plan.devices]:
            future.result()
    seconds = time.perf_counter() - start_s
    sent = sum(peer.payload_bytes_sent for box in boxes.values() for peer in box.counters().peers.values())
    for box in boxes.values():
        box.close()
    return seconds, sent


def _holding(plan: Plan, name: str, graph, job: TrainJob) -> tuple[Holding, object]:
    stage = plan.crew_of(name).numbers[0]
    units = build_units(plan.model, plan.stages[stage].units, seed=1)
    executor = StageExecutor(units, is_last=True, global_batch=plan.global_batch)
    parameters = executor.named_parameters()
    return holding_of(plan, name, graph, parameters), build_optimizer(job, parameters.values())


def _verdict(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-mini")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints, 4 at least")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--loads", type=int, default=3)
    options = parser.parse_args()
    if options.every < 4:
        parser.error("--every: give 4 at least, so that some steps see nothing of a save")
    cluster, model = parse_cluster(CLUSTER, source="benchmark"), resolve_model(options.model)
    units, generations = unit_count(model), itertools.count(1)
    same = plan_of(cluster, model, [0, units // 2, units], options.global_batch, next(generations))
    other = plan_of(cluster, model, [0, 1, units - 2, units], options.global_batch, next(generations))
    job = TrainJob(steps=options.steps, checkpoint_every=options.every)
    print(f"model {model.name}, {len(same.devices)} processes, {options.steps} steps, a save every {options.every}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        holds = measure_saving(same, job, folder)
        plans = {"its own plan": same, "another plan": other}
        measure_loading(folder / "run", plans, job, folder / "disks", options.loads)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
