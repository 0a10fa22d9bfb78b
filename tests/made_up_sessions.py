"""Training sessions of all devices of a plan in one process: threads, mailboxes in memory, the real barrier."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from patience import PATIENCE_S
from spantrain.core.checkpoint import CheckpointContent, SampleLedger, StoredFile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.errors import Interrupted
from spantrain.models.device import CpuDevice
from spantrain.models.graph import build_graph
from spantrain.runtime.advice import Advice, check_change
from spantrain.runtime.barrier import StepBarrier, StepOutcome
from spantrain.runtime.checkpoint.complete import CheckpointSet
from spantrain.runtime.checkpoint.manifest import Manifest
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.groups import StageGroups
from spantrain.runtime.memory_groups import thread_groups
from spantrain.runtime.orders import PeerEntry, TrainOrder, TrainResult
from spantrain.runtime.trainer import Colleagues, TrainSession
from spantrain.transport.memory import MemoryNetwork


class Script:
    """In the place of an adviser: which plan takes over behind which step."""

    def __init__(self, first: Plan, changes: Mapping[int, Plan]) -> None:
        self._plan = first
        self._changes = dict(changes)
        self._step = 0

    def take(self) -> Advice | None:
        plan = self._changes.pop(self._step, None)
        if plan is None:
            return None
        check_change(self._plan, plan)
        self._step += 1
        self._plan = replace(plan, generation=self._plan.generation + 1)
        return Advice(plan=self._plan, reason="as the script says")

    def ask(self, step: int, _reports: object) -> None:
        self._step = step + 1


@dataclass(kw_only=True)
class Ran:
    """What became of a run."""

    losses: list[float]
    held_out: list[float]
    outcomes: list[StepOutcome]
    results: dict[str, TrainResult]
    sessions: dict[str, TrainSession]
    manifests: list[Manifest] = field(default_factory=list)


class _Groups:
    """Groups of threads, one set for each generation and stage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[int, int], Mapping[str, StageGroups]] = {}

    def open(self, plan: Plan, stage_index: int, device: str) -> StageGroups:
        with self._lock:
            key = plan.generation, stage_index
            if key not in self._made:
                self._made[key] = thread_groups(plan.stages[stage_index])
            return self._made[key][device]


def train_in_threads(
    plan: Plan,
    job: TrainJob,
    changes: Mapping[int, Plan] | None = None,
    *,
    out: Path | None = None,
    content: CheckpointContent | None = None,
    folder: Path | None = None,
) -> Ran:
    """Train a plan of replicas of one device, and any others that take its place behind the steps that are named."""
    network, groups, failed = MemoryNetwork(), _Groups(), threading.Event()
    boxes = {name: network.mailbox(name) for name in plan.devices}
    outcomes: list[StepOutcome] = []
    barrier = StepBarrier(
        devices=frozenset(plan.devices),
        job=job,
        global_batch=plan.global_batch,
        stop_requested=lambda: False,
        on_step=outcomes.append,
        can_checkpoint=out is not None,
        advising=Script(plan, changes or {}),  # type: ignore[arg-type]
    )
    saving = threading.Lock()
    manifests: list[Manifest] = []

    def describe(saved: SavedFile, files: Mapping[str, StoredFile]) -> Manifest:
        manifests.append(
            Manifest(
                step=saved.step,
                model=plan.model,
                plan=plan,
                job=job,
                schedule=plan.schedule,
                profile="",
                losses=(),
                ledger=SampleLedger().extended(0, plan.global_batch),
                scalars=saved.scalars,
                files=files,
            )
        )
        return manifests[-1]

    checkpoints = CheckpointSet(out or Path("nowhere"), plan.devices, keep=9, describe=describe)

    def note_saved(file: SavedFile) -> tuple[int, ...]:
        with saving:
            checkpoints.on_saved(file)
        return ()

    def check_abort() -> None:
        if failed.is_set():
            raise Interrupted("another device failed")

    def colleagues(name: str) -> Colleagues:
        return Colleagues(
            mailbox=boxes[name],
            admit=lambda generation, peers: boxes[name].set_peers(generation, [peer.address for peer in peers]),
            begin=lambda: None,
            commit_step=lambda report: barrier.report(name, report),
            open_groups=lambda under, stage_index: groups.open(under, stage_index, name),
            checkpoint_saved=note_saved,
            ask_given=lambda _question: {},
            check_abort=check_abort,
            clock_offset_s=0.0,
        )

    first_step = content.step if content else 0
    order = TrainOrder(
        plan=plan,
        graph=build_graph(plan.model),
        job=job,
        peers=tuple(PeerEntry(name=box.name, endpoint=box.endpoint, public_key="") for box in boxes.values()),
        schedule=plan.schedule,
        output_dir=str(out) if out else "",
        first_step=first_step,
        samples_before=first_step * plan.global_batch,
        resume_from=str(folder) if folder else "",
        checkpoint=content,
    )
    # One after another: torch's random numbers belong to all threads.
    sessions = {name: TrainSession(order, name, CpuDevice(), colleagues(name)) for name in plan.devices}

    def run(name: str) -> TrainResult:
        torch.set_num_threads(1)
        finished = False
        try:
            result = sessions[name].run()
            finished = True
        finally:
            if not finished:
                failed.set()
                barrier.abort(f"{name} failed")
                for box in boxes.values():
                    box.wake()
        return result

    with ThreadPoolExecutor(len(boxes)) as pool:
        futures = {name: pool.submit(run, name) for name in plan.devices}
        wait(futures.values(), PATIENCE_S)
        errors = [future.exception() for future in futures.values() if future.exception() is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Interrupted)):
            raise error
    for box in boxes.values():
        box.close()
    return Ran(
        losses=[outcome.loss for outcome in outcomes if outcome.loss is not None],
        held_out=[outcome.evaluation_loss for outcome in outcomes if outcome.evaluation_loss is not None],
        outcomes=outcomes,
        results={name: future.result() for name, future in futures.items()},
        sessions=sessions,
        manifests=manifests,
    )
