"""Train a plan: plan and job in, losses and measurements out."""

import math
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spantrain.app.emulation import MOST_REAL_COMPUTE, too_fast, what_is_emulated
from spantrain.app.predict import optimizer_state, predict
from spantrain.app.reporter import Reporter
from spantrain.app.run_folder import TRACE_FILE, MeasuredStep, RunContent, write_run
from spantrain.app.session import Session
from spantrain.app.tensorboard import ScalarWriter
from spantrain.config.artefacts import from_json
from spantrain.core.checkpoint import CheckpointContent, SampleLedger, StoredFile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.trace import Trace
from spantrain.cost.tensor import normalised
from spantrain.errors import ConfigError
from spantrain.runtime.barrier import StepBarrier, StepOutcome
from spantrain.runtime.checkpoint.complete import CheckpointSet
from spantrain.runtime.checkpoint.manifest import Manifest
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.given import GIVEN, BatchDesk
from spantrain.runtime.orders import TrainOrder, TrainResult
from spantrain.sim.engine import SimulationResult

__all__ = [
    "DeviceFigures",
    "HeldOutLoss",
    "LinkFigures",
    "Resume",
    "StopRequest",
    "TrainOutcome",
    "TrainRequest",
    "train",
]

_WARM_UP_STEPS = 2


class StopRequest:
    """Ctrl-C: the first asks for a checkpoint and a clean end, the second for an end at once."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def ask(self) -> int:
        """Count one more wish to stop."""
        with self._lock:
            self._count += 1
            return self._count

    @property
    def wanted(self) -> bool:
        """Whether the run should end after this step."""
        return self._count > 0

    @property
    def at_once(self) -> bool:
        """Whether the run should end now."""
        return self._count > 1


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What an earlier run left."""

    folder: Path
    """Of its checkpoint."""
    content: CheckpointContent
    """Its steps among it."""
    losses: tuple[float, ...]
    ledger: SampleLedger
    """Which samples were consumed."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What to train, how, and where to write."""

    plan: Plan
    profile: Profile
    profile_path: str
    """For the checkpoint, so that it can be resumed."""
    job: TrainJob
    schedule: str
    out: Path
    checkpoints: bool = True
    keep_checkpoints: int = 2
    """So many complete ones stay, the newest."""
    resume: Resume | None = None
    tensorboard: Path | None = None
    batches: BatchDesk | None = None
    """Where a user's own loop puts its batches, one a step; the model's data set is then `given`."""


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """How one device was used, over the measured steps."""

    kind: str
    stage: int
    sample_share: float
    """Of the stage's samples."""
    tensor_share: float
    """Of each tensor that its replica divides, as planned; 1 on a device alone."""
    utilisation: float
    """Device time computing, over step time."""
    utilisation_predicted: float
    bubble_ratio: float
    peak_held_samples: int
    peak_bytes: int | None
    """The most that its tensors held at once; by its allocator on CUDA, else without passing needs of operations."""
    peak_bytes_predicted: int
    """The same by the memory model over the simulated steps (`docs/memory.md`)."""
    real_compute_ratio: float
    """Seconds of real computation per second of device time (1 on real devices)."""
    overrun_actions: int
    overhead_median_s: float
    """Runtime time per action outside computation and waiting."""
    overhead_p90_s: float
    """Nine of ten actions have less."""


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """What went from one device to another."""

    bytes_sent: int
    bytes_received: int
    mean_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """The loss on a held-out batch, with the parameters after so many steps."""

    steps_done: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """What became of a run; the JSON that `spantrain train --json` ends with."""

    losses: tuple[float, ...]
    """Of every step since the first, those before a resume included."""
    step_s_measured: float
    """Median over the steps after the warm-up, evaluations left out."""
    step_s_predicted: float
    prediction_error_ratio: float
    """Measured over predicted, minus one."""
    samples_per_s: float
    steps: int
    """Done in all."""
    devices: Mapping[str, DeviceFigures]
    links: Mapping[str, LinkFigures]
    generation: int
    schedule: str
    trace: str
    """Path of the trace, or empty."""
    checkpoint: str
    """Path of the newest checkpoint, or empty."""
    heldout_losses: tuple[HeldOutLoss, ...]
    refused_messages: Mapping[str, int]
    interrupted: bool
    emulated: str
    """What was emulated and what was real."""


def train(session: Session, request: TrainRequest, stop: StopRequest, reporter: Reporter) -> TrainOutcome:
    """Run the plan's devices until the steps are done or a stop is asked for.

    Raises:
        ConfigError: the plan is of a run whose batches came from a user's own loop.
        WorkerError, PeerLostError: a device failed or was lost; the run has been ended everywhere.
    """
    if request.batches is None and request.plan.model.dataset == GIVEN:
        raise ConfigError(
            "this run's batches came from a loop of its own: go on with it from there (spantrain.session with "
            "resume_from_checkpoint), or from Python with data (spantrain.Trainer)"
        )
    return _Run(session, request, stop, reporter).run()


class _Run:
    def __init__(self, session: Session, request: TrainRequest, stop: StopRequest, reporter: Reporter) -> None:
        self._session = session
        self._request = request
        self._stop = stop
        self._reporter = reporter
        self._outcomes: list[StepOutcome] = []
        self._losses = list(request.resume.losses) if request.resume else []
        self._first_step = request.resume.content.step if request.resume else 0
        before = request.resume.ledger if request.resume else SampleLedger()
        self._ledger = before.extended(self._first_step, request.plan.global_batch)
        self._checkpoints = CheckpointSet(
            request.out, request.plan.devices, keep=request.keep_checkpoints, describe=self._manifest
        )
        self._checkpoint = ""
        self._scalars = ScalarWriter(request.tensorboard)

    def run(self) -> TrainOutcome:
        request = self._request
        plan = request.plan
        barrier = StepBarrier(
            devices=frozenset(plan.devices),
            job=request.job,
            global_batch=plan.global_batch,
            stop_requested=lambda: self._stop.wanted,
            on_step=lambda outcome: self._session.coordinator.later(lambda: self._on_step(outcome)),
            can_checkpoint=request.checkpoints,
        )
        self._reporter.phase(f"Training {plan.model.name} on {len(plan.devices)} devices, {request.schedule}")
        self._reporter.run_begins(plan)
        try:
            answers = self._session.coordinator.train(
                {name: self._order() for name in plan.devices},
                barrier,
                self._on_saved,
                lambda: self._stop.at_once,
                request.batches,
            )
        finally:
            self._scalars.close()
        results = {
            name: from_json(TrainResult, answer["result"], f"result of {name}") for name, answer in answers.items()
        }
        return self._outcome(results)

    def _order(self) -> TrainOrder:
        request = self._request
        return TrainOrder(
            plan=replace(request.plan, alternatives=(), reasons=()),
            graph=request.profile.graph,
            job=request.job,
            peers=self._session.coordinator.peers(request.plan.devices),
            schedule=request.schedule,
            output_dir=str(request.out.resolve()) if request.checkpoints else "",
            first_step=self._first_step,
            samples_before=self._ledger.samples_before(self._first_step),
            resume_from=str(request.resume.folder.resolve()) if request.resume else "",
            checkpoint=request.resume.content if request.resume else None,
        )

    def _on_step(self, outcome: StepOutcome) -> None:
        self._outcomes.append(outcome)
        if outcome.loss is not None:
            self._losses.append(outcome.loss)
            self._reporter.step(outcome, self._request.job.steps)
        self._scalars.write(outcome, self._request.plan.global_batch)

    def _on_saved(self, saved: SavedFile) -> tuple[int, ...]:
        """Have a device's part of a checkpoint noted; called in a thread of that device's call."""
        self._session.coordinator.later(lambda: self._note_saved(saved))
        return self._checkpoints.dropped

    def _note_saved(self, saved: SavedFile) -> None:
        folder = self._checkpoints.on_saved(saved)
        if folder is not None:
            self._checkpoint = str(folder)
            self._reporter.saved(self._checkpoint)

    def _manifest(self, saved: SavedFile, files: Mapping[str, StoredFile]) -> Manifest:
        request = self._request
        return Manifest(
            step=saved.step,
            model=request.plan.model,
            plan=request.plan,
            job=request.job,
            schedule=request.schedule,
            profile=request.profile_path,
            losses=tuple(self._losses[: saved.step]),
            ledger=self._ledger,
            scalars=saved.scalars,
            files=files,
        )

    def _outcome(self, results: Mapping[str, TrainResult]) -> TrainOutcome:
        request = self._request
        plan = request.plan
        measured_s = measured_step_s(self._outcomes)
        predicted = predict(plan, request.profile, request.schedule, optimizer=optimizer_state(request.job))
        ratio = max(result.real_compute_ratio for result in results.values())
        if plan.cluster.emulated and ratio > MOST_REAL_COMPUTE:
            self._reporter.note(too_fast(plan.cluster, ratio))
        for notice in dict.fromkeys(text for result in results.values() for text in result.notices):
            self._reporter.note(notice)
        self._write(results)
        refused: dict[str, int] = {}
        for result in results.values():
            for reason, count in result.refused.items():
                refused[reason] = refused.get(reason, 0) + count
        return TrainOutcome(
            losses=tuple(self._losses),
            step_s_measured=measured_s,
            step_s_predicted=predicted.step_s,
            prediction_error_ratio=measured_s / predicted.step_s - 1.0,
            samples_per_s=plan.global_batch / measured_s,
            steps=len(self._losses),
            devices={name: self._device(name, results[name], predicted) for name in plan.devices},
            links=self._links(results),
            generation=plan.generation,
            schedule=request.schedule,
            trace=str(request.out / TRACE_FILE),
            checkpoint=self._checkpoint,
            heldout_losses=tuple(
                HeldOutLoss(steps_done=outcome.step, loss=outcome.evaluation_loss)
                for outcome in self._outcomes
                if outcome.evaluation_loss is not None
            ),
            refused_messages=refused,
            interrupted=self._stop.wanted,
            emulated=what_is_emulated(plan, self._session.network),
        )

    def _write(self, results: Mapping[str, TrainResult]) -> None:
        """Leave in the run's folder what `spantrain validate` compares."""
        request = self._request
        steps = tuple(
            MeasuredStep(
                duration_s=outcome.duration_s, busy_s=outcome.busy_s, peak_held_samples=outcome.peak_held_samples
            )
            for outcome in _steady(self._outcomes)
        )
        content = RunContent(
            plan=request.plan,
            profile=request.profile,
            schedule=request.schedule,
            optimizer=optimizer_state(request.job),
            steps=steps,
            peak_bytes={name: r.peak_bytes for name, r in results.items() if r.peak_bytes is not None},
            trace=Trace.joined([result.trace for result in results.values()], "wall"),
            decisions=tuple(result.decisions for result in results.values()),
        )
        write_run(request.out, content)

    def _device(self, name: str, result: TrainResult, predicted: SimulationResult) -> DeviceFigures:
        plan = self._request.plan
        stage_index, replica_index = plan.place(name)
        replicas = plan.stages[stage_index].replicas
        own = replicas[replica_index]
        steady = _steady(self._outcomes)
        utilisation = statistics.fmean(outcome.busy_s[name] for outcome in steady) / statistics.fmean(
            outcome.duration_s for outcome in steady
        )
        return DeviceFigures(
            kind=plan.cluster.device_by_name[name].kind,
            stage=stage_index,
            sample_share=own.sample_share / sum(replica.sample_share for replica in replicas),
            tensor_share=normalised(own.tp_shares)[own.devices.index(name)],
            utilisation=utilisation,
            utilisation_predicted=predicted.utilisation[name],
            bubble_ratio=max(0.0, 1.0 - utilisation),
            peak_held_samples=max(outcome.peak_held_samples[name] for outcome in self._outcomes),
            peak_bytes=result.peak_bytes,
            peak_bytes_predicted=predicted.memory[name].tensor_bytes,
            real_compute_ratio=result.real_compute_ratio,
            overrun_actions=result.overrun_actions,
            overhead_median_s=_quantile(result.overhead_s, 0.5),
            overhead_p90_s=_quantile(result.overhead_s, 0.9),
        )

    def _links(self, results: Mapping[str, TrainResult]) -> dict[str, LinkFigures]:
        total_s = sum(outcome.duration_s for outcome in self._outcomes)
        return {
            f"{source} -> {target}": LinkFigures(
                bytes_sent=size,
                bytes_received=results[target].received_bytes.get(source, 0) if target in results else 0,
                mean_bytes_per_s=size / total_s,
            )
            for source, result in results.items()
            for target, size in sorted(result.sent_bytes.items())
            if size
        }


def measured_step_s(outcomes: Sequence[StepOutcome]) -> float:
    """Return the median duration of the steps after the warm-up, evaluations left out."""
    return statistics.median(outcome.duration_s for outcome in _steady(outcomes))


def _quantile(values: Sequence[float], part: float) -> float:
    """Return the value that this part of all values does not exceed; 0 of none."""
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else 0.0


def _steady(outcomes: Sequence[StepOutcome]) -> list[StepOutcome]:
    trained = [outcome for outcome in outcomes if outcome.loss is not None]
    calm = [outcome for outcome in trained if outcome.evaluation_loss is None]
    return calm[_WARM_UP_STEPS:] or calm or trained
