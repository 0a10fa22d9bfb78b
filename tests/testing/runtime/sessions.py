"""Training sessions of all devices of a plan in one process: threads, mailboxes in memory, the real barrier."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spantrain.core.checkpoint import CheckpointContent, SampleLedger, StoredFile
from spantrain.core.job import TrainJob
from spantrain.core.outer.stages import OuterCluster
from spantrain.core.plan import Plan
from spantrain.errors import Interrupted
from spantrain.runtime.checkpoint.manifest import CheckpointSet, Manifest
from spantrain.runtime.control.orders import FollowOrder, KeptState, TrainOrder, TrainResult
from spantrain.runtime.control.requests import AheadChange, AheadCopy, Introduction, SavedFile
from spantrain.runtime.coordinator.advice import Advice, check_change
from spantrain.runtime.coordinator.barrier import StepBarrier, StepOutcome
from spantrain.runtime.coordinator.meetings import StageMeetings
from spantrain.runtime.coordinator.roster import Roster
from spantrain.runtime.coordinator.worker_service import TrainingRun, UnderWay, WorkerService
from spantrain.runtime.gradients.groups import StageGroups
from spantrain.runtime.step.context import WorkerLinks
from spantrain.runtime.worker.carry_on import LeftState
from spantrain.runtime.worker.keeping.ahead import FollowSession
from spantrain.runtime.worker.stale_session import session_of
from spantrain.runtime.worker.trainer import TrainSession
from spantrain.transport.connection.peers import PeerAddress
from testing.backend import compute_device
from testing.memory_mailbox import MemoryNetwork
from testing.models.graphs import graph_of
from testing.patience import PATIENCE_S
from testing.runtime.control import MemoryControlPlane
from testing.runtime.thread_groups import thread_groups


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


def whole_bytes(ran: Ran, device: str) -> int:
    """Bytes that whole parameters of a device take between steps."""
    parameters = ran.sessions[device]._part.member.named_parameters.values()
    return sum(one.untyped_storage().nbytes() for one in parameters)


class _Groups:
    """Groups of threads, one set for each generation and stage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[int, int], Mapping[str, StageGroups]] = {}

    def open(self, plan: Plan, stage_index: int, device: str, *, joined: bool) -> StageGroups:
        with self._lock:
            key = plan.generation, stage_index
            if key not in self._made:
                self._made[key] = thread_groups(plan.stages[stage_index], joined=joined)
            return self._made[key][device]


class Cast:
    """All that the devices of one run share."""

    def __init__(
        self,
        plan: Plan,
        job: TrainJob,
        changes: Mapping[int, Plan],
        out: Path | None,
        first_step: int = 0,
        others: Sequence[str] = (),
    ) -> None:
        network = MemoryNetwork()
        self.plan, self.job, self.out = plan, job, out
        self.boxes = {name: network.mailbox(name) for name in (*plan.devices, *others)}
        self.outcomes: list[StepOutcome] = []
        self.on_step: Callable[[StepOutcome], None] = lambda _outcome: None
        self.manifests: list[Manifest] = []
        self._groups = _Groups()
        self.meetings = StageMeetings(frozenset(plan.devices), hold_s=PATIENCE_S)
        self._failed = threading.Event()
        self._saving = threading.Lock()
        self.barrier = StepBarrier(
            plan=plan,
            job=job,
            first_step=first_step,
            stop_requested=lambda: False,
            on_step=self._note_step,
            can_checkpoint=out is not None,
            advising=Script(plan, changes),  # type: ignore[arg-type]
            hold_s=PATIENCE_S,
        )
        self._checkpoints = CheckpointSet(out or Path("nowhere"), plan.devices, keep=9, describe=self._describe)

    def _note_step(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        self.on_step(outcome)

    def _describe(self, saved: SavedFile, files: Mapping[str, StoredFile]) -> Manifest:
        self.manifests.append(
            Manifest(
                step=saved.step,
                model=self.plan.model,
                plan=self.plan,
                job=self.job,
                profile="",
                losses=(),
                ledger=SampleLedger().extended(0, self.plan.global_batch),
                scalars=saved.scalars,
                files=files,
            )
        )
        return self.manifests[-1]

    def _note_saved(self, file: SavedFile) -> tuple[int, ...]:
        with self._saving:
            self._checkpoints.on_saved(file)
        return ()

    def _check_abort(self) -> None:
        if self._failed.is_set():
            raise Interrupted("another device failed")

    def serve(self, order: TrainOrder) -> None:
        """Give all devices this order, which all of them have admitted each other for."""
        run = TrainingRun(barrier=self.barrier, on_saved=self._note_saved, meetings=self.meetings)
        self._run = UnderWay.of(dict.fromkeys(self.plan.devices, order), run=run)
        self._run.ready.update(self.plan.devices)
        roster = Roster(tuple(self.boxes), PATIENCE_S)
        self.service = service = WorkerService(roster, later=lambda call: call())
        for name, box in self.boxes.items():
            roster.join(0.0, name)
            roster.introduce(name, Introduction(endpoint=box.endpoint, public_key=""))
        service.give(self._run)
        self._handlers = service.handlers

    def links(self, name: str) -> WorkerLinks:
        return WorkerLinks(
            name=name,
            device=compute_device(),
            mailbox=self.boxes[name],
            control=MemoryControlPlane(self._handlers, name, check=self._check_abort),
            check_abort=self._check_abort,
            open_groups=lambda under, stage, joined: self._groups.open(under, stage, name, joined=joined),
        )

    def peers(self, names: Iterable[str]) -> tuple[PeerAddress, ...]:
        return tuple(self.boxes[name].address for name in names)

    def order(
        self, content: CheckpointContent | None, folder: Path | None, outer: OuterCluster | None = None
    ) -> TrainOrder:
        """What a coordinator would send; `content` and `folder`: of the checkpoint to begin with."""
        first_step = content.step if content else 0
        return TrainOrder(
            plan=self.plan,
            graph=graph_of(self.plan.model),
            job=self.job,
            peers=self.peers(self.plan.devices),
            output_dir=str(self.out) if self.out else "",
            first_step=first_step,
            samples_before=first_step * self.plan.global_batch,
            resume_from=str(folder) if folder else "",
            checkpoint=content,
            outer=outer,
        )

    def play(self, name: str, session: TrainSession | FollowSession) -> Any:
        """Run a device in this thread; if it fails, nobody is left waiting."""
        torch.set_num_threads(1)
        finished = False
        try:
            result = session.run()
            finished = True
        finally:
            if not finished:
                self._failed.set()
                self._run.abort(f"{name} failed")
                for box in self.boxes.values():
                    box.wake()
        return result


def _play_all(cast: Cast, sessions: Mapping[str, TrainSession | FollowSession]) -> dict[str, Any]:
    with ThreadPoolExecutor(len(sessions)) as pool:
        futures = {name: pool.submit(cast.play, name, session) for name, session in sessions.items()}
        wait(futures.values(), PATIENCE_S)
        errors = [future.exception() for future in futures.values() if future.exception() is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Interrupted)):
            raise error
    return {name: future.result() for name, future in futures.items()}


def train_in_threads(
    plan: Plan,
    job: TrainJob,
    changes: Mapping[int, Plan] | None = None,
    *,
    out: Path | None = None,
    content: CheckpointContent | None = None,
    folder: Path | None = None,
    outer: OuterCluster | None = None,
) -> Ran:
    """Train a plan of replicas of one device, and any others that take its place behind the steps that are named."""
    cast = Cast(plan, job, changes or {}, out, content.step if content else 0)
    order = cast.order(content, folder, outer)
    cast.serve(order)
    # One after another: torch's random numbers belong to all threads.
    sessions = {name: session_of(order, cast.links(name)) for name in plan.devices}
    results = _play_all(cast, sessions)
    for box in cast.boxes.values():
        box.close()
    return Ran(
        losses=[outcome.loss for outcome in cast.outcomes if outcome.loss is not None],
        held_out=[outcome.evaluation_loss for outcome in cast.outcomes if outcome.evaluation_loss is not None],
        outcomes=cast.outcomes,
        results=results,
        sessions=sessions,
        manifests=cast.manifests,
    )


@dataclass(kw_only=True)
class RanAhead:
    """What became of a run that paused with state taken ahead, or had done all steps before."""

    losses: list[float]
    paused: bool
    sessions: dict[str, TrainSession]
    followers: dict[str, FollowSession]

    def left(self) -> dict[str, LeftState | None]:
        """What each device holds."""
        step, kept = len(self.losses), KeptState(verdict=None)
        return {name: one.leave(kept, step) for name, one in (self.sessions | self.followers).items()}


def train_ahead(plan: Plan, job: TrainJob, copies: Sequence[AheadCopy], *, begin: int) -> RanAhead:
    """Train a plan, and have state copied ahead of another behind a step, which devices follow that have no part."""
    new = sorted({copy.taker for copy in copies} - {*plan.devices})
    cast = Cast(plan, job, {}, None, others=new)
    order = cast.order(None, None)
    cast.serve(order)
    change = AheadChange(number=1, generation=plan.generation, copies=tuple(copies), newcomers=cast.peers(new))
    follow = FollowOrder(plan=plan, graph=order.graph, job=job, peers=cast.peers((*plan.devices, *new)), change=change)

    def begin_at(outcome: StepOutcome) -> None:
        if outcome.step == begin:
            cast.barrier.take_ahead(change)

    cast.on_step = begin_at
    sessions = {name: session_of(order, cast.links(name)) for name in plan.devices}
    cast.service.add(dict.fromkeys(new, follow))
    followers = {}
    for name in new:
        cast.boxes[name].set_peers(plan.generation, follow.peers)
        followers[name] = FollowSession(follow, cast.links(name))
    _play_all(cast, sessions | followers)
    for box in cast.boxes.values():
        box.close()
    return RanAhead(
        losses=[outcome.loss for outcome in cast.outcomes if outcome.loss is not None],
        paused=cast.barrier.paused,
        sessions=sessions,
        followers=followers,
    )
