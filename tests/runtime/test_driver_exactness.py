"""Any plan and schedule gives the gradients of one device: real executors, policies and messages, in threads."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.messages import Decision, DeviceDecisions
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.devices.base import ComputeDevice
from spantrain.formats.registry import WireFormat
from spantrain.models.build import build_units
from spantrain.models.data.dataset import open_dataset
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.units import UnitModule, loss_of, rows_read
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.recorder import StepRecorder
from spantrain.runtime.step.driver import StepDriver
from spantrain.runtime.step.following import Followers
from spantrain.runtime.step.own_stage import StageWork
from spantrain.runtime.step.work import DeviceClock, ReplicaWork, SampledFeed
from spantrain.schedule.registry import make_machine, replica_tasks, schedule_names
from spantrain.sim.costs import TableCosts
from spantrain.sim.replay import replay, simulated_order
from spantrain.sim.search.interleaved import with_interleaved_order
from spantrain.sim.search.model import Room
from spantrain.sim.search.search import SearchEffort, with_hints
from testing.backend import compute_device
from testing.late_device import LateDevice, Later
from testing.memory_mailbox import MemoryNetwork
from testing.models.graphs import graph_of
from testing.patience import PATIENCE_S
from testing.plans import interleaved, stage_and_replica
from testing.restless import RestlessLocal
from testing.runtime.runs import context_of

SEED = 3
TOLERANCE = 1e-5
FLOOR = 1e-4
"""Gradients this much smaller than the largest are rounding (the key bias of attention has none at all)."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    loss_sum: float
    gradients: dict[str, list[torch.Tensor]]
    """By name, one for each copy."""
    peaks: dict[str, int]
    """Samples held at most, by device."""
    sent_bytes: dict[tuple[str, str], int]
    """Of tensors, by sender and receiver."""


class Cast:
    """The devices of a plan: their mailboxes and executors."""

    def __init__(self, plan: Plan, open_device: Callable[[], ComputeDevice]) -> None:
        network = MemoryNetwork()
        self.plan = plan
        self.devices = {name: open_device() for name in plan.devices}
        self.mailboxes = {name: network.mailbox(name) for name in plan.devices}
        self._tasks = replica_tasks(plan)
        self._data = open_dataset(plan.model)
        self.executors = {name: self._chunks(name) for name in plan.devices}

    def _executor(self, stage: int, name: str, by_unit: Mapping[int, UnitModule]) -> StageExecutor:
        return StageExecutor(
            [by_unit[unit] for unit in self.plan.stages[stage].units],
            is_last=stage == len(self.plan.stages) - 1,
            global_batch=self.plan.global_batch,
            torch_device=self.devices[name].torch_device,
        )

    def _chunks(self, name: str) -> dict[int, StageExecutor]:
        """Return what runs each stage of a device."""
        crew = self.plan.crew_of(name)
        by_unit = dict(zip(crew.units, build_units(self.plan.model, crew.units, seed=SEED), strict=True))
        return {stage: self._executor(stage, name, by_unit) for stage in crew.numbers}

    def _driver(self, name: str, recorder: StepRecorder, restless: int | None) -> StepDriver:
        device = self.devices[name]
        feed = SampledFeed(self._data, global_batch=self.plan.global_batch, seed=SEED)
        clock = DeviceClock(device=device, seconds=lambda _op, _samples: None)
        stages = {
            stage: StageWork(
                work=ReplicaWork(
                    executors=(executor,), feed=feed, is_first=stage == 0, is_last=stage == len(self.plan.stages) - 1
                ),
                clock=clock,
            )
            for stage, executor in self.executors[name].items()
        }
        return StepDriver(
            context_of(name, self.mailboxes[name], feed, recorder),
            self.plan,
            stages=stages,
            followers=Followers(MemberGroup(), device.torch_device),
            local=None if restless is None else RestlessLocal(restless),
        )

    def play(self, name: str, steps: int, restless: int | None) -> tuple[float, int]:
        """Run one device's steps in this thread; return the sum of its losses, and the most samples that it held."""
        torch.set_num_threads(1)
        self.mailboxes[name].set_peers(self.plan.generation, [box.address for box in self.mailboxes.values()])
        recorder = StepRecorder(name, steps=steps)
        driver = self._driver(name, recorder, restless)
        crew = self.plan.crew_of(name)
        task = self._tasks[self.plan.crews.index(crew)][crew.replica_index(name)]
        policy = make_machine(self.plan.schedule, task)
        losses, peak = [], 0
        for step in range(steps):
            recorder.begin_step()
            losses.append(driver.run_step(step, policy) or 0.0)
            peak = max(peak, recorder.figures.peak_held_samples)
        check_decisions(self.plan, name, recorder.decisions())
        return sum(losses), peak

    def gradients(self) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for chunks in self.executors.values():
            named = {full: own for one in chunks.values() for full, own in one.named_parameters().items()}
            for full, parameter in {id(own): (full, own) for full, own in named.items()}.values():
                if parameter.grad is not None:
                    found.setdefault(full, []).append(parameter.grad.cpu())
        return found

    def sent_bytes(self) -> dict[tuple[str, str], int]:
        return {
            (name, peer): counters.payload_bytes_sent
            for name, mailbox in self.mailboxes.items()
            for peer, counters in mailbox.counters().peers.items()
        }


def run_plan(
    plan: Plan,
    steps: int = 1,
    *,
    restless: int | None = None,
    open_device: Callable[[], ComputeDevice] = compute_device,
) -> Ran:
    """Run a plan's first steps in threads; with a seed, micro-batches are re-cut at random all the time."""
    cast = Cast(plan, open_device)
    with ThreadPoolExecutor(len(plan.devices)) as pool:
        futures = {name: pool.submit(cast.play, name, steps, restless) for name in plan.devices}
        results = {name: future.result(PATIENCE_S) for name, future in futures.items()}
    ran = Ran(
        loss_sum=sum(loss for loss, _ in results.values()),
        gradients=cast.gradients(),
        peaks={name: peak for name, (_, peak) in results.items()},
        sent_bytes=cast.sent_bytes(),
    )
    for mailbox in cast.mailboxes.values():
        mailbox.close()
    return ran


def check_decisions(plan: Plan, name: str, decisions: tuple[Decision, ...]) -> None:
    """What the live policy answered, a fresh one answers; and so does the simulator, given the arrival times."""
    log = DeviceDecisions(device=name, trace_shift_s=0.0, decisions=decisions)
    crew = plan.crew_of(name)
    task = replica_tasks(plan)[plan.crews.index(crew)][crew.replica_index(name)]
    own = [stage.replica_spans(crew.replica_index(name)) for stage in crew.stages]
    assert sum(len(decision.run) for decision in decisions) >= 2 * sum(map(len, own))
    assert replay(plan.schedule, task, log) is None
    assert simulated_order(plan.schedule, task, log) is None


def reference_gradients(plan: Plan, reference, steps: int = 1):
    units, parameters = reference(plan.model, SEED)
    feed = SampledFeed(open_dataset(plan.model), global_batch=plan.global_batch, seed=SEED)
    total = 0.0
    for step in range(steps):
        loss = loss_of(units, feed.rows(step, Span(0, plan.global_batch), rows_read(units)))
        (loss / plan.global_batch).backward()
        total += float(loss.detach())
    return total, parameters


def check(plan: Plan, reference, steps: int = 1, **options) -> None:
    ran = run_plan(plan, steps, **options)
    wanted_loss, parameters = reference_gradients(plan, reference, steps)
    assert ran.loss_sum == pytest.approx(wanted_loss, rel=TOLERANCE)
    check_gradients(ran.gradients, parameters, TOLERANCE)
    for device, peak in ran.peaks.items():
        crew = plan.crew_of(device)
        assert peak <= sum(stage.replicas[crew.replica_index(device)].in_flight_limit for stage in crew.stages)


def check_gradients(gradients, parameters, tolerance: float) -> None:
    """All parameters' gradients are those of one process, to a relative error of each one's norm."""
    largest = max(float(p.grad.norm()) for p in parameters.values() if p.grad is not None)
    # Copies of one parameter, also under the names that a tied parameter has elsewhere, add up.
    by_parameter: dict[int, torch.Tensor] = {}
    for name, copies in gradients.items():
        key = id(parameters[name])
        by_parameter[key] = sum(copies, by_parameter.get(key, torch.zeros_like(copies[0])))
    for name, parameter in parameters.items():
        got, want = by_parameter[id(parameter)], parameter.grad
        assert want is not None, name
        error = float((got - want).norm())
        assert error <= tolerance * max(float(want.norm()), FLOOR * largest), (name, error)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_plans_of_text_models(data, plans, reference):
    check(data.draw(plans(("gpt2", "bert"))), reference)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), restless=st.one_of(st.none(), st.integers(0, 2**16)), seed=st.integers(0, 2**16))
def test_random_plans_on_devices_whose_results_come_later(data, restless, seed, plans, reference):
    devices: list[LateDevice] = []

    def open_device() -> LateDevice:
        devices.append(LateDevice(seed + len(devices)))
        return devices[-1]

    plan = data.draw(plans(("gpt2", "bert")))
    check(plan, reference, 2, restless=restless, open_device=open_device)


def test_a_wait_that_is_left_out_is_found(make_plan, spec_of, reference, monkeypatch):
    """What is handed on before it is there is no number: the device would find every such place in the driver."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, 2), Span(2, 4), Span(4, 6)]] * 2, "1f1b")
    devices = [LateDevice(seed) for seed in range(2)]
    opened = iter(devices)
    check(plan, reference, 2, open_device=lambda: next(opened))
    assert all(device.handed_over_early for device in devices)
    monkeypatch.setattr(Later, "is_over", property(lambda _: True))
    monkeypatch.setattr(Later, "wait", lambda _: None)
    with pytest.raises(AssertionError):
        check(plan, reference, 2, open_device=LateDevice)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_plans_of_image_models(data, plans, reference):
    check(data.draw(plans(("resnet", "efficientnet"))), reference)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_plans_that_follow_a_searched_order(data, plans, reference):
    """The order comes from made-up times, so live messages come otherwise than planned."""
    plan = replace(data.draw(plans(("gpt2",))), schedule="critical-path")
    cuts = len(plan.stages) - 1
    seconds = st.integers(1, 8).map(float)
    costs = TableCosts(
        sample_s=tuple({op: data.draw(seconds) for op in Op} for _ in plan.stages),
        latency_s=tuple(data.draw(seconds) for _ in range(cuts)),
        forward_s=tuple(data.draw(seconds) for _ in range(cuts)),
        backward_s=tuple(data.draw(seconds) for _ in range(cuts)),
    )
    check(with_hints(plan, costs, effort=SearchEffort(max_runs=40)), reference, steps=2)


def room_of(plan: Plan, samples: int) -> dict[str, Room]:
    """Room for so many samples in flight on each device, whichever of its stages they are of."""
    return {
        name: Room(size_bytes=samples, sample_bytes=dict.fromkeys(plan.crew_of(name).numbers, 1.0))
        for name in plan.leaders
    }


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_interleaved_plans(data, make_plan, spec_of, reference):
    """Devices with several stages each, in turn or there and back, in static orders, searched ones and by rules."""
    spans = [Span(lo, lo + 1) for lo in range(6)] if data.draw(st.booleans()) else [Span(0, 2), Span(2, 4), Span(4, 6)]
    shares = data.draw(st.sampled_from([[1], [1, 1], [2, 1]])) if len(spans) == 3 else [1]
    chunks, back = data.draw(st.sampled_from([([0, 1, 2, 3, 5], False), ([0, 2, 3, 4, 5], True), ([0, 3, 5], False)]))
    plan = make_plan(spec_of("gpt2"), chunks, [shares] * (len(chunks) - 1), [spans] * (len(chunks) - 1), "compact")
    plan = interleaved(plan, there_and_back=back)
    way = data.draw(st.sampled_from(["compact", "critical-path", "zb-v" if back else "interleaved", "searched"]))
    plan = replace(plan, schedule="critical-path" if way == "searched" else way)
    if way == "searched":
        cuts = len(plan.stages) - 1
        sample_s = tuple({op: data.draw(st.integers(1, 8).map(float)) for op in Op} for _ in plan.stages)
        costs = TableCosts(
            sample_s=sample_s, latency_s=(1.0,) * cuts, forward_s=(1.0,) * cuts, backward_s=(1.0,) * cuts
        )
        found = with_interleaved_order(plan, costs, room_of(plan, data.draw(st.integers(5, 12))))
        plan = plan if found is None else found
    check(plan, reference, steps=2)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_recuts_in_mid_step_leave_gradients_as_they_are(data, plans, reference):
    """Every device cuts what has not begun otherwise, and sends in pieces, as it likes; its decisions replay."""
    plan = data.draw(plans(("gpt2", "resnet")))
    check(plan, reference, steps=2, restless=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("schedule", schedule_names())
def test_steps_follow_each_other(schedule, make_plan, spec_of, reference):
    """Several steps without a barrier between them: early messages of the next step are kept apart."""
    spans = [[Span(0, 2), Span(2, 4), Span(4, 6)], [Span(0, 3), Span(3, 6)], [Span(0, 2), Span(2, 6)]]
    if schedule in ("gpipe", "1f1b", "1f1b-asteroid", "interleaved"):
        spans = [spans[0]] * 3
    plan = make_plan(spec_of("gpt2"), [0, 1, 3, 5], [[1], [2, 1], [1]], spans, schedule)
    check(plan, reference, steps=3)


ROUNDED = {WireFormat.FLOAT16: 0.002, WireFormat.BFLOAT16: 0.01, WireFormat.INT8: 0.05, WireFormat.INT4: 0.5}
"""Relative error of gradients that passed a cut in a format."""


@pytest.mark.parametrize(
    ("family", "wire_format"),
    [*(("gpt2", one) for one in ROUNDED), ("resnet", WireFormat.BFLOAT16), ("resnet", WireFormat.INT8)],
)
def test_a_rounded_cut_sends_the_models_bytes_and_stays_close(wire_format, family, make_plan, spec_of, reference):
    """Unequal replicas and spans; the first cut is exact, the second is not."""
    spans = [[Span(0, 2), Span(2, 4), Span(4, 6)], [Span(0, 3), Span(3, 6)], [Span(0, 2), Span(2, 6)]]
    edges = [0, 1, 3, 5] if family == "gpt2" else [0, 2, 4, 5]
    plan = make_plan(spec_of(family), edges, [[1], [2, 1], [1]], spans, "critical-path")
    first, second, last = plan.stages
    rounded_plan = replace(plan, stages=(first, replace(second, wire_format=wire_format), last))
    exact, rounded = run_plan(plan), run_plan(rounded_plan)
    units = graph_of(plan.model).units
    for (source, target), size in exact.sent_bytes.items():
        lower, upper = stage_and_replica(plan, source)[0], stage_and_replica(plan, target)[0]
        cut, up = units[plan.stages[min(lower, upper)].end_unit - 1], lower < upper
        form = wire_format if {lower, upper} == {1, 2} else WireFormat.NATIVE
        native = cut.forward_bytes(WireFormat.NATIVE) if up else cut.backward_bytes(WireFormat.NATIVE)
        if size:
            per_sample = cut.forward_bytes(form) if up else cut.backward_bytes(form)
            assert rounded.sent_bytes[source, target] == size // native * per_sample
        assert size % native == 0
    assert exact.loss_sum != rounded.loss_sum == pytest.approx(exact.loss_sum, rel=5 * ROUNDED[wire_format])
    _, parameters = reference_gradients(plan, reference)
    check_gradients(rounded.gradients, parameters, ROUNDED[wire_format])
    with pytest.raises(AssertionError):
        check_gradients(rounded.gradients, parameters, TOLERANCE)
