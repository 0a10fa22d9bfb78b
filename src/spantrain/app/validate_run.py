"""Compare a live run with what the simulator says of its plan; plan, profile, trace and decisions in, figures out."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from spantrain.app.planning.plan_files import open_plan
from spantrain.app.training.run_record import DECISIONS_FILE, RUN_FILE, TRACE_FILE, RunRecord, read_run_record
from spantrain.app.watching.chain import lane_of
from spantrain.config.traces.trace_file import read_decisions, read_trace
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.trace import Interval, Trace
from spantrain.errors import ConfigError
from spantrain.planner.engine.predict import costs_of, predict
from spantrain.sim.engine import SimulationResult
from spantrain.sim.replay import compare_all, replay, simulated_order

_AGAIN = "train again with `spantrain train`"
_PIPELINE_LANES = ("forward", "backward", "tied:")


class DeviceComparison(Record):
    """One device in a step."""

    busy_s_predicted: float
    busy_s_measured: float
    """Computing: actions only, without sums of gradients and the update."""
    peak_held_samples_predicted: int
    peak_held_samples_measured: int | None
    """None where the run did not note it."""
    peak_bytes_predicted: int | None = None
    """Without the framework's own constant, which no allocator counts; None where nothing was measured."""
    peak_bytes_measured: int | None = None
    """None where the device cannot tell."""


class LinkComparison(Record):
    """What one device sends another in a step: bytes of tensors, without the protocol's own."""

    bytes_predicted: int
    bytes_measured: int


class RunValidation(Record):
    """A run beside its prediction."""

    folder: str
    model: str
    schedule: str
    step_s_predicted: float
    step_s_measured: float
    """Median over the steady steps."""
    step_error_ratio: float
    """Predicted over measured, minus one."""
    steps_measured: int
    measured_by: str
    """The file that the measured step time comes from."""
    devices: Mapping[str, DeviceComparison]
    links: Mapping[str, LinkComparison]
    """By `source -> target`."""
    decisions: int | None
    """How many were made again; None where the run left no log of them."""
    differences: tuple[str, ...]
    """Where fresh policies answer otherwise than the live ones did: of each device the first, with context."""
    order_differences: tuple[str, ...]
    """Where a simulated replica, given the live arrival times, runs another order."""

    @property
    def replays(self) -> bool:
        """Whether all decisions were made again just as they were."""
        return self.decisions is not None and not self.differences and not self.order_differences


def validate_run(folder: Path) -> RunValidation:
    """Compare the run in a folder with its prediction.

    Raises:
        PlanError, ProfileError, ConfigError, UsageError: a file is missing, foreign or wrong; file, field, value and
            remedy are in the message.
    """
    record = read_run_record(folder)
    plan_path = folder / (record.plan if record else "plan.json")
    plan, profile = open_plan(plan_path)
    staleness = record.staleness if record else 0
    trace = _read_trace(folder / TRACE_FILE, plan, staleness).since(record.first_step if record else 0)
    logs = read_decisions(folder / DECISIONS_FILE) if (folder / DECISIONS_FILE).exists() else None
    _check_devices(folder / DECISIONS_FILE, {log.device for log in logs or ()}, plan, "the files")
    optimizer = record.optimizer if record and record.peak_bytes else None
    predicted = predict(plan, profile, optimizer=optimizer, staleness=staleness)
    step_s, steps, source = _measured_step(trace, record, folder)
    return RunValidation(
        folder=str(folder), model=plan.model.name, schedule=plan.schedule, step_s_predicted=predicted.step_s,
        step_s_measured=step_s, step_error_ratio=predicted.step_s / step_s - 1.0, steps_measured=steps,
        measured_by=source, devices=_devices(plan, predicted, trace, record),
        links=_links(plan, profile, predicted, trace),
        decisions=None if logs is None else sum(len(log.decisions) for log in logs),
        differences=tuple(map(str, compare_all(plan, logs or (), replay))),
        order_differences=tuple(map(str, compare_all(plan, logs or (), simulated_order))),
    )  # fmt: skip


def _read_trace(path: Path, plan: Plan, staleness: int) -> Trace:
    """Read a trace that runs forward in time, but for steps that overlap, and is of this plan's devices."""
    trace = read_trace(path)
    if not trace.intervals:
        raise ConfigError(f"{path}: holds no steps; {_AGAIN} and --trace-steps 3")
    _check_devices(path, {interval.device for interval in trace.intervals}, plan, "the trace and the plan")
    for before, after in (pair for device in plan.devices for pair in pairwise(trace.of(device))):
        if after.step < before.step - staleness:
            raise ConfigError(
                f"{path}: steps are out of order: {_name(after)} starts at {after.start_s:.6f} s, after "
                f"{_name(before)}; {_AGAIN}"
            )
    return trace


def _name(interval: Interval) -> str:
    return f"{interval.device}, {interval.lane}, {interval.name} of step {interval.step}"


def _check_devices(path: Path, found: set[str], plan: Plan, files: str) -> None:
    """Refuse a file that is of devices which the plan does not have."""
    unknown = sorted(found - set(plan.devices))
    if unknown:
        raise ConfigError(
            f"{path}: is of {', '.join(unknown)}, the plan has {', '.join(plan.devices)}; put {files} of one run "
            f"together, or {_AGAIN}"
        )


def _measured_step(trace: Trace, record: RunRecord | None, folder: Path) -> tuple[float, int, str]:
    """Return the median seconds of a step, over how many, and the file that says so."""
    if record is not None:
        return record.step_s, record.steps_measured, RUN_FILE
    begins: dict[int, float] = {}
    for interval in trace.intervals:
        if interval.lane == "compute":
            begins[interval.step] = min(interval.start_s, begins.get(interval.step, interval.start_s))
    durations_s = [begins[b] - begins[a] for a, b in pairwise(sorted(begins)) if b == a + 1]
    if not durations_s:
        raise ConfigError(
            f"{folder / TRACE_FILE}: holds step {', '.join(map(str, begins))} alone and there is no {RUN_FILE}, so no "
            f"step can be timed; {_AGAIN} and --trace-steps 3"
        )
    return statistics.median(durations_s), len(durations_s), TRACE_FILE


def _devices(
    plan: Plan, predicted: SimulationResult, trace: Trace, record: RunRecord | None
) -> dict[str, DeviceComparison]:
    measured_bytes = record.peak_bytes if record else {}
    return {
        name: DeviceComparison(
            busy_s_predicted=_busy_s(predicted.trace, name),
            busy_s_measured=record.busy_s[name] if record and name in record.busy_s else _busy_s(trace, name),
            peak_held_samples_predicted=predicted.peak_in_flight[name],
            peak_held_samples_measured=record.peak_held_samples.get(name) if record else None,
            peak_bytes_predicted=(
                predicted.memory[name].counted_bytes(plan.cluster.device_by_name[name].backend)
                if name in measured_bytes
                else None
            ),
            peak_bytes_measured=measured_bytes.get(name),
        )
        for name in plan.devices
    }


def _busy_s(trace: Trace, device: str) -> float:
    """Return the median over steps of the seconds that a device runs actions."""
    by_step: defaultdict[int, float] = defaultdict(float)
    for interval in trace.of(device):
        if interval.action is not None:
            by_step[interval.step] += interval.duration_s
    return statistics.median(by_step.values()) if by_step else 0.0


def _links(plan: Plan, profile: Profile, predicted: SimulationResult, trace: Trace) -> dict[str, LinkComparison]:
    """Compare the bytes of the last step in the trace: of earlier ones, early messages may be missing."""
    ours = Counter(predicted.link_bytes)
    ours.update(costs_of(plan, profile).tied_bytes())
    last = max((interval.step for interval in trace.intervals), default=0)
    theirs: Counter[tuple[str, str]] = Counter()
    for flow in trace.flows:
        if flow.step == last and lane_of(flow.name).startswith(_PIPELINE_LANES):
            theirs[flow.source, flow.target] += flow.size_bytes
    return {
        " -> ".join(pair): LinkComparison(bytes_predicted=ours[pair], bytes_measured=theirs[pair])
        for pair in sorted(ours.keys() | theirs.keys())
    }
