"""What became of a training run: figures of devices, links and steps, and the plans that it has had."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spantrain.app.training.run_folder import SWITCHES_FILE, free_name, typical_s
from spantrain.app.training.traced_run import NetworkTraceFigures
from spantrain.config.artefacts import write_plan
from spantrain.config.files.json_codec import to_json
from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport
from spantrain.core.quantities import format_bytes, format_seconds, mean_of_finite
from spantrain.core.records import Record
from spantrain.core.shares import shares_of
from spantrain.core.trace import Interval, Trace
from spantrain.core.units import UnitGraph
from spantrain.cost.analytic import peak_flop_per_s
from spantrain.cost.compute import normalised
from spantrain.devices.meters import MeterReading
from spantrain.errors import PlanError
from spantrain.runtime.control.orders import TrainResult
from spantrain.runtime.control.requests import SwitchReport
from spantrain.runtime.coordinator.advice import Advice
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.sim.engine import SimulationResult


class PlanChange(Record):
    """One plan that took over while a run went on."""

    first_step: int
    """First step under it."""
    generation: int
    reason: str
    plan: str
    """Its file in the run's folder."""
    duration_s: float
    """Seconds that the devices were kept from working: the slowest of them, from the verdict on the step before."""
    moved_bytes: int
    """Bytes of parameters and optimizer state that went between devices."""

    def __str__(self) -> str:
        moved = f"{format_bytes(self.moved_bytes)} moved" if self.moved_bytes else "nothing moved"
        return (
            f"plan {self.generation} from step {self.first_step + 1} on ({self.plan}): {self.reason}; "
            f"{format_seconds(self.duration_s)}, {moved}"
        )


class PlanChanges:
    """Follows a run from plan to plan."""

    def __init__(self, plan: Plan, *, first_step: int, folder: Path, tell: Callable[[str], None]) -> None:
        """Begin with a plan; `tell` says a line to the user."""
        self._folder = folder
        self._tell = tell
        self._goes_on = first_step > 0
        """Whether the folder's log is of this run."""
        self._plans = [(first_step, plan)]
        self.files: dict[str, Plan] = {}
        """The plans that took over, by the names of their files in the run's folder."""
        self._under_way: tuple[str, str] | None = None
        """File and reason of the plan that takes over."""
        self.changes: list[PlanChange] = []

    @property
    def plan(self) -> Plan:
        """The present one."""
        return self._plans[-1][1]

    @property
    def first_step(self) -> int:
        """First step under the present plan."""
        return self._plans[-1][0]

    def after(self, steps_done: int) -> Plan:
        """Return the plan of the step behind so many."""
        return next(plan for first, plan in reversed(self._plans) if first <= steps_done)

    def decided(self, step: int, advice: Advice) -> None:
        """Note that a plan takes over behind a step; write it down, if that can be."""
        plan = advice.plan
        name = free_name(self._folder, f"plan-{plan.generation}")
        try:
            write_plan(replace(plan, profile=None), self._folder / name, PlanReport(reasons=(advice.reason,)))
        except PlanError as error:
            self._tell(f"{error}; the run goes on")
        self.files[name] = plan
        self._plans.append((step + 1, plan))
        self._under_way = name, advice.reason

    def ended(self, steps_done: int) -> None:
        """Forget a plan that has run no step."""
        if self.first_step >= steps_done and self._under_way is not None and len(self._plans) > 1:
            self._plans.pop()
            del self.files[self._under_way[0]]

    def done(self, figures: SwitchReport) -> None:
        """Note what the change took, behind the first step under the plan; write it down, if that can be."""
        assert self._under_way is not None, "a plan is decided on before it takes over"
        name, reason = self._under_way
        change = PlanChange(
            first_step=self.first_step,
            generation=self.plan.generation,
            reason=reason,
            plan=name,
            duration_s=figures.duration_s,
            moved_bytes=figures.received_bytes,
        )
        self._under_way = None
        self.changes.append(change)
        try:
            with (self._folder / SWITCHES_FILE).open("a" if self._goes_on else "w", encoding="utf-8") as log:
                log.write(json.dumps(to_json(change), ensure_ascii=False) + "\n")
        except OSError as error:
            self._tell(f"{self._folder / SWITCHES_FILE}: cannot be written: {error.strerror}; the run goes on")
        self._goes_on = True
        self._tell(str(change))


def with_reasons(trace: Trace, changes: Sequence[PlanChange]) -> Trace:
    """Return a run's trace with a moment on the `adapter` lane where a device went over to another plan, saying why."""
    of_step = {change.first_step: change for change in changes}
    first: dict[tuple[str, int], Interval] = {}
    for interval in sorted(trace.intervals, key=lambda interval: interval.start_s):
        if interval.lane == "compute" and interval.step in of_step:
            first.setdefault((interval.device, interval.step), interval)
    moments = (
        Interval(
            device=device,
            lane="adapter",
            name=f"plan {of_step[step].generation}",
            step=step,
            start_s=interval.start_s,
            end_s=interval.start_s,
            detail={"reason": of_step[step].reason, "plan": of_step[step].plan},
        )
        for (device, step), interval in first.items()
    )
    return replace(trace, intervals=(*trace.intervals, *moments))


_WARM_UP_STEPS = 2


class DeviceFigures(Record):
    """How one device was used, over the measured steps."""

    kind: str
    stages: tuple[int, ...]
    sample_share: float
    """Part of the stage's samples."""
    tensor_share: float
    """Part of each tensor that its replica divides, as planned; 1 on a device alone."""
    utilisation: float
    """Device time computing, over step time."""
    utilisation_predicted: float
    bubble_ratio: float
    flop_ratio: float
    """Operations of the model in a step, nothing computed twice counted, over what the device could do by its data
    sheet: MFU."""
    power_w: float | None
    """Mean over the measured steps, by the device's own meters; None: it has none, or they do not tell."""
    energy_j: float | None
    """What it took between the first and the last of those steps, by them."""
    slowed_by: str
    """Why its clocks were lower than they could be in any of those steps, by them; empty: they were not."""
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


class LinkFigures(Record):
    """What went from one device to another."""

    bytes_sent: int
    bytes_received: int
    mean_bytes_per_s: float


class HeldOutLoss(Record):
    """The loss on a held-out batch, with the parameters after so many steps."""

    steps_done: int
    loss: float


class TrainOutcome(Record):
    """What became of a run; the JSON that `spantrain train --json` ends with."""

    losses: tuple[float | None, ...]
    """Loss of every step since the first, those before a resume included; None where it was not finite: float16 skips
    such a step."""
    step_s_measured: float
    """Median over the steps of the last plan, after its first two, evaluations left out."""
    step_s_predicted: float
    """Seconds of a step under the last plan, on the network that it was made for."""
    prediction_error_ratio: float
    """Measured over predicted, minus one."""
    samples_per_s: float
    steps: int
    """Done in all."""
    devices: Mapping[str, DeviceFigures]
    links: Mapping[str, LinkFigures]
    generation: int
    """Generation of the last plan."""
    schedule: str
    """Schedule of the last plan."""
    trace: str
    """Path of the trace, or empty."""
    checkpoint: str
    """Path of the newest checkpoint, or empty."""
    heldout_losses: tuple[HeldOutLoss, ...]
    refused_messages: Mapping[str, int]
    interrupted: bool
    emulated: str
    """What was emulated and what was real."""
    network_trace: NetworkTraceFigures | None = None
    """How the links changed, and when steps ended; None where they did not."""
    plan_changes: tuple[PlanChange, ...] = ()
    """Plans that took over while the run went on."""
    weights: str = ""
    """What it began with, if that is not as ever: those of a folder, or random ones."""
    left_out: tuple[str, ...] = ()
    """What of the model as it was given was not done, a line each (`core.units.UnitGraph`)."""
    first_step: int
    """Steps done before a resume."""
    train_s: float
    """Seconds of the steps since then."""
    samples: int
    """Trained on in them."""
    epoch: float | None
    """Samples trained on in all, over those of the data set, where that is known."""

    @property
    def global_step(self) -> int:
        """Steps done in all."""
        return self.steps

    @property
    def training_loss(self) -> float:
        """The mean over the steps since a resume, of those whose loss is finite."""
        return mean_of_finite(self.losses[self.first_step :])

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by the names of the transformers library's trainer."""
        found = {
            "train_runtime": self.train_s,
            "train_samples_per_second": self.samples / self.train_s,
            "train_steps_per_second": (self.steps - self.first_step) / self.train_s,
            "train_loss": self.training_loss,
        }
        return found if self.epoch is None else found | {"epoch": self.epoch}


def device_figures(
    plan: Plan, name: str, result: TrainResult, predicted: SimulationResult, outcomes: Sequence[StepOutcome],
    graph: UnitGraph,
) -> DeviceFigures:  # fmt: skip
    """Return how one device was used in steps under a plan."""
    crew = plan.crew_of(name)
    replicas = crew.first.replicas
    own = replicas[crew.replica_index(name)]
    measured, device = steady(outcomes), plan.cluster.device_by_name[name]
    step_s = statistics.fmean(outcome.duration_s for outcome in measured)
    utilisation = statistics.fmean(outcome.busy_s[name] for outcome in measured) / step_s
    sample_share = own.sample_share / sum(replica.sample_share for replica in replicas)
    member, units = shares_of(own.tp_shares)[own.devices.index(name)], [graph.units[unit] for unit in crew.units]
    flop = sum(unit.training_flop_per_sample * unit.work_share(member) for unit in units)
    could = peak_flop_per_s(plan.cluster.kind_by_name[device.kind], plan.dtype) * plan.cluster.emulated_speed
    return DeviceFigures(
        kind=device.kind, stages=crew.numbers, sample_share=sample_share,
        tensor_share=normalised(own.tp_shares)[own.devices.index(name)],
        flop_ratio=flop * sample_share * plan.global_batch / (step_s * could),
        **_metered([outcome.meters[name] for outcome in measured if name in outcome.meters]), utilisation=utilisation,
        utilisation_predicted=predicted.utilisation[name], bubble_ratio=max(0.0, 1.0 - utilisation),
        peak_held_samples=max(outcome.peak_held_samples[name] for outcome in outcomes), peak_bytes=result.peak_bytes,
        peak_bytes_predicted=predicted.memory[name].counted_bytes(device.backend),
        real_compute_ratio=result.real_compute_ratio, overrun_actions=result.overrun_actions,
        overhead_median_s=_quantile(result.overhead_s, 0.5), overhead_p90_s=_quantile(result.overhead_s, 0.9),
    )  # fmt: skip


def _metered(told: Sequence[MeterReading]) -> dict[str, Any]:
    """Return what a device's own meters told of steps, as `DeviceFigures` has it."""
    power_w = [one.power_w for one in told if one.power_w is not None]
    energy_j = [one.energy_j for one in told if one.energy_j is not None]
    return {
        "power_w": statistics.fmean(power_w) if power_w else None,
        "energy_j": energy_j[-1] - energy_j[0] if energy_j else None,
        "slowed_by": ", ".join(dict.fromkeys(one.slowed_by for one in told if one.slowed_by)),
    }


def link_figures(results: Mapping[str, TrainResult], total_s: float) -> dict[str, LinkFigures]:
    """Return what went between devices in so many seconds, by `source -> target`."""
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


def measured_step_s(outcomes: Sequence[StepOutcome], *, overlap: bool = False, otherwise_s: float = 0.0) -> float:
    """Return the duration of a step after the warm-up, evaluations left out, as `run_folder.typical_s` takes it.

    `otherwise_s`: where no step was trained.
    """
    durations_s = [outcome.duration_s for outcome in steady(outcomes)]
    return typical_s(durations_s, overlap=overlap) if durations_s else otherwise_s


def steady(outcomes: Sequence[StepOutcome]) -> list[StepOutcome]:
    """Return the steps after the warm-up, evaluations left out; if there are none of these, what there is."""
    trained = [outcome for outcome in outcomes if outcome.loss is not None]
    calm = [outcome for outcome in trained if outcome.evaluation_loss is None]
    return calm[_WARM_UP_STEPS:] or calm or trained


def _quantile(values: Sequence[float], part: float) -> float:
    """Return the value that this part of all values does not exceed; 0 of none."""
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else 0.0


def refused_messages(results: Iterable[TrainResult]) -> dict[str, int]:
    """Return how many messages were turned away on all devices, by reason."""
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.refused)
    return dict(total)
