"""Sums of gradients beside the last backward: in one order, begun early, and what goes wrong in them is told."""

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from spantrain.core.action import Action, Op
from spantrain.core.plan import OWN_SUMS, GradientSums
from spantrain.core.span import Span
from spantrain.cost.sums import fill_buckets
from spantrain.devices.emulated import EmulatedDevice
from spantrain.errors import Interrupted, PeerLostError, WorkerError
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.units import ModuleUnit, UnitModule
from spantrain.models.weight_gradients import LINEAR, DeferringLayer, Linear
from spantrain.runtime.gradients.step_sums import Background, StepSums, buckets_of
from spantrain.runtime.step.own_stage import LastBackward
from spantrain.runtime.step.work import DeviceClock, UnitTimes
from testing.models.rows import rows_of
from testing.patience import PATIENCE_S
from testing.runtime.gloo_members import CLASSES, WIDTH, Classes, Tokens

SPAN = Span(0, 3)


def never() -> None:
    """Nobody aborts."""


@pytest.fixture
def background():
    thread = Background("test sums")
    yield thread
    thread.close()


def parameters_of(*sizes: int) -> dict[str, nn.Parameter]:
    return {f"p{number}": nn.Parameter(torch.ones(size)) for number, size in enumerate(sizes)}


def sums_of(
    parameters: dict[str, nn.Parameter],
    beside: Sequence[Sequence[str]],
    reduce: Callable[[Sequence[Tensor]], None],
    background: Background,
    sums: GradientSums = OWN_SUMS,
) -> StepSums:
    """Sums of which nothing is left to wait for when they have begun."""

    def begin_sum(gradients: Sequence[Tensor]) -> Callable[[], None]:
        reduce(gradients)
        return never

    return StepSums(parameters, beside=beside, begin_sum=begin_sum, background=background, behind=None, sums=sums)


@given(data=st.data(), count=st.integers(1, 8))
def test_buckets_leave_in_one_order_whatever_comes_first(data, count):
    parameters = parameters_of(*range(1, count + 1))
    names = data.draw(st.permutations(list(parameters)))
    edges = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))})
    buckets = [list(parameters)[lo:hi] for lo, hi in pairwise(edges)]
    seen: list[list[int]] = []
    background = Background("test sums")
    sums = sums_of(parameters, buckets, lambda gradients: seen.append([g.numel() for g in gradients]), background)
    told = data.draw(st.integers(0, count))
    for name in names[:told]:
        sums.final([name])
    sums.finish(never)
    background.close()
    assert seen == [[parameters[name].numel() for name in bucket] for bucket in buckets]
    assert len(sums.intervals) == len(buckets)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_so_many_buckets_are_under_way_at_once_and_end_in_their_order(at_once):
    parameters = parameters_of(*[1] * 7)
    background, held = Background("test sums"), threading.Event()
    log: list[str] = []

    def begin_sum(gradients: Sequence[Tensor]) -> Callable[[], None]:
        held.wait(PATIENCE_S)
        number = sum(entry.startswith("+") for entry in log)
        log.append(f"+{number}")
        return lambda: log.append(f"-{number}")

    sums = StepSums(
        parameters,
        beside=[[name] for name in parameters],
        begin_sum=begin_sum,
        background=background,
        behind=None,
        sums=GradientSums(at_once=at_once),
    )
    sums.all_final()
    held.set()
    sums.finish(never)
    background.close()
    assert [entry for entry in log if entry[0] == "+"] == [f"+{number}" for number in range(7)]
    assert [entry for entry in log if entry[0] == "-"] == [f"-{number}" for number in range(7)]
    under_way = [sum(1 if e[0] == "+" else -1 for e in log[: place + 1]) for place in range(len(log))]
    assert max(under_way) == at_once
    assert len(sums.intervals) == 7


def test_where_the_plan_says_so_nothing_is_summed_before_the_backward_is_over(background):
    summed: list[int] = []
    sums = sums_of(
        parameters_of(1, 2),
        [["p0"], ["p1"]],
        lambda gradients: summed.append(gradients[0].numel()),
        background,
        GradientSums(beside_backward=False),
    )
    sums.final(["p0"])
    background.wait(background.begin(never), never)
    assert summed == []
    sums.finish(never)
    assert summed == [1, 2]


@given(
    sizes=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6),
    most=st.integers(1, 20),
    first=st.none() | st.integers(1, 20),
)
def test_buckets_are_whole_with_the_units_that_the_simulator_says(sizes, most, first):
    """Units from the last on, each with parameters of so many numbers; a number has four bytes."""
    parameters = {
        f"{unit}.{number}": nn.Parameter(torch.zeros(size))
        for unit, row in reversed(list(enumerate(sizes)))
        for number, size in enumerate(row)
        if size
    }
    elements = {name: parameter.numel() for name, parameter in parameters.items()}
    sums = GradientSums(bucket_bytes=4 * most, first_bucket_bytes=None if first is None else 4 * first)
    buckets = buckets_of(parameters.items(), elements, sums)
    assert [name for bucket in buckets for name in bucket] == list(parameters)
    found = [int(bucket[-1].partition(".")[0]) for bucket in buckets]
    said = [bucket.last_unit for bucket in fill_buckets([4 * sum(row) for row in sizes], sums)]
    # A large parameter is one bucket here, and several that are whole together there.
    assert set(found) == set(said)
    assert len(found) <= len(said)


class Slow(DeferringLayer, nn.Linear):
    """Computes the gradient of its weights when it may."""

    waits: Callable[[], object]

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.defers(LINEAR, tensor, self.weight):
            self.weight.register_hook(lambda gradient: self.waits() and None)
        return self.multiplied(SlowProduct(self.waits), tensor, self.weight, self.bias)


class SlowProduct(Linear):
    def __init__(self, waits: Callable[[], object]) -> None:
        self.waits = waits

    def weight_gradient(self, *tensors: torch.Tensor) -> torch.Tensor:
        self.waits()
        return super().weight_gradient(*tensors)


def stage(*, is_first: bool, waits: Callable[[], object]) -> tuple[StageExecutor, nn.Parameter]:
    """Two or three units, of which the one before the last computes its gradients when it may."""
    torch.manual_seed(0)
    slow = Slow(WIDTH, WIDTH)
    slow.waits = waits
    units: list[UnitModule] = [ModuleUnit("slow", slow), Classes()]
    if is_first:
        units.insert(0, Tokens())
    return StageExecutor(units, is_last=True, global_batch=SPAN.size), slow.weight


@pytest.mark.parametrize("op", [Op.BACKWARD, Op.BACKWARD_WEIGHT])
def test_a_sum_goes_on_while_the_backward_does(op, background):
    """The backward of the unit before the last waits until the last one's gradients are summed."""
    summed = threading.Event()
    waited: list[bool] = []
    executor, _ = stage(is_first=op is Op.BACKWARD, waits=lambda: waited.append(summed.wait(PATIENCE_S)))
    names = [list(names) for names in executor.names_by_unit]
    sums = sums_of(executor.named_parameters(), names[::-1], lambda _gradients: summed.set(), background)
    inputs = torch.arange(SPAN.size) if op is Op.BACKWARD else torch.randn(SPAN.size, WIDTH)
    received, read = ((), (inputs,)) if op is Op.BACKWARD else ((inputs,), ())
    executor.forward(SPAN, received, rows_of(read, torch.tensor([1, 2, CLASSES - 1])))
    if op is Op.BACKWARD:
        executor.backward(SPAN, (), sums.final)
    else:
        executor.backward_input(SPAN, ())
        executor.backward_weight(SPAN, sums.final)
    assert waited == [True]
    sums.finish(never)


@pytest.mark.parametrize("recompute", [(), (0,), (1,)])
@pytest.mark.parametrize("split", [False, True])
def test_every_gradient_is_told_once_it_is_whole(split, recompute):
    """What was told is not changed any more, and units are told from the last to the first."""
    torch.manual_seed(0)
    units: list[UnitModule] = [ModuleUnit(f"u{number}", nn.Linear(WIDTH, WIDTH)) for number in range(3)]
    units[2].body.weight = units[1].body.weight  # shared inside of the stage
    executor = StageExecutor([*units, Classes()], is_last=True, global_batch=3, recompute=recompute)
    told: dict[str, Tensor] = {}

    def final(names) -> None:
        for name in names:
            gradient = executor.named_parameters()[name].grad
            told.setdefault(name, None if gradient is None else gradient.clone())

    executor.forward(SPAN, (torch.randn(SPAN.size, WIDTH),), rows_of((), torch.tensor([1, 2, 3])))
    if split:
        executor.backward_input(SPAN, ())
        executor.backward_weight(SPAN, final)
    else:
        executor.backward(SPAN, (), final)
    parameters = executor.named_parameters()
    assert told.keys() == parameters.keys()
    assert all(torch.equal(told[name], parameters[name].grad) for name in parameters)
    assert [name for names in executor.names_by_unit for name in names] == list(parameters)


def test_a_peer_that_is_lost_in_a_sum_is_told_and_ends_all_later_ones(background):
    calls: list[int] = []

    def reduce(gradients: Sequence[Tensor]) -> None:
        calls.append(len(gradients))
        raise PeerLostError("another device of this stage went away")

    parameters = parameters_of(1, 1, 1)
    sums = sums_of(parameters, [["p0"], ["p1"], ["p2"]], reduce, background)
    with pytest.raises(PeerLostError, match="went away"):
        sums.finish(never)
    with pytest.raises(PeerLostError, match="went away"):
        sums_of(parameters, [["p0"]], reduce, background).finish(never)
    assert calls == [1]


def test_an_abort_is_heard_while_a_sum_hangs(background):
    ends = threading.Event()

    def check_abort() -> None:
        raise Interrupted("the run was ended")

    sums = sums_of(parameters_of(1), [["p0"]], lambda _gradients: ends.wait(PATIENCE_S) and None, background)
    with pytest.raises(Interrupted):
        sums.finish(check_abort)
    ends.set()


def test_a_thread_that_ends_by_a_bug_is_noticed(background, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)

    def bug(gradients: Sequence[Tensor]) -> None:
        raise LookupError("a bug")

    with pytest.raises(WorkerError, match="the thread ended"):
        sums_of(parameters_of(1), [["p0"]], bug, background).finish(never)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
def test_the_last_backward_is_known_however_the_step_is_cut(sizes, data):
    total = sum(sizes)
    edges = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    spans = data.draw(st.permutations([Span(lo, hi) for lo, hi in pairwise(edges)]))
    last = LastBackward(total)
    told: list[str] = []
    for step in (4, 5):
        last.begin(step, told.extend)
        for span in spans:
            assert last.of(step, Action(1, Op.FORWARD, span)) is None
            assert last.of(step, Action(1, Op.BACKWARD_INPUT, span)) is None
        found = [last.of(step, Action(1, Op.BACKWARD_WEIGHT, span)) for span in spans]
        assert [final is not None for final in found] == [False] * (len(spans) - 1) + [True]


class MadeUpClock:
    """A clock that moves when it is waited for."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, deadline_s: float) -> None:
        self.time_s = max(self.time_s, deadline_s)


def test_an_emulated_device_makes_gradients_known_unit_by_unit():
    clock = MadeUpClock()
    times = UnitTimes(
        seconds=lambda _op, samples: (1.0 * samples, 2.0 * samples, 0.0), names=(("a",), ("b", "c"), ("d",))
    )
    device = DeviceClock(
        device=EmulatedDevice(clock=clock),
        seconds=lambda op, samples: sum(times.seconds(op, samples)),
        unit_times=times,
    )
    known: list[tuple[float, tuple[str, ...]]] = []
    device.run(Op.BACKWARD, 2, tuple, lambda names: known.append((clock.time_s, tuple(names))))
    assert known == [(0.0, ("d",)), (4.0, ("b", "c")), (6.0, ("a",))]
    assert clock.time_s == 6.0
    assert device.told_by_work(never) is None
    device.run(Op.FORWARD, 1, tuple)
    assert clock.time_s == 9.0
    assert len(known) == 3
