"""Units that take an emulated device's time: when forward passes return, and when gradients are there."""

import pytest
import torch
from torch import nn

from spantrain.core.action import Op
from spantrain.devices.base import NOTHING_MORE, ComputeDevice, CpuDevice
from spantrain.devices.emulated import EmulatedDevice
from spantrain.errors import ConfigError
from spantrain.models.units import LABELS, ModuleUnit
from spantrain_studies.comparison.worker.device import CountingProcessor, StartedElsewhereDevice, framework_device
from spantrain_studies.comparison.worker.stages import StageModule
from spantrain_studies.comparison.worker.whole import PlainUnit, TimedChain, UnitChain


class FakeClock:
    """Time that passes only in waiting, and where it is told to."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, deadline_s: float) -> None:
        self.time_s = max(self.time_s, deadline_s)


class Slow(torch.autograd.Function):
    """Takes real time in its backward pass."""

    @staticmethod
    def forward(ctx, tensor, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.time_s += ctx.seconds
        return gradient, None, None


class Body(nn.Module):
    def __init__(self, clock: FakeClock, real_s: float) -> None:
        super().__init__()
        self.layer, self.clock, self.real_s = nn.Linear(2, 2), clock, real_s

    def forward(self, tensor):
        return self.layer(Slow.apply(tensor, self.clock, self.real_s))


class Loss(ModuleUnit):
    def forward(self, tensor, labels):
        return (self.body(tensor) - labels).square().sum()


def seconds(op: Op, samples: int) -> float:
    return {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}[op] * samples


def chain(clock: FakeClock, real_s: float) -> TimedChain:
    torch.manual_seed(0)
    device = StartedElsewhereDevice(clock=clock)
    first, middle = (ModuleUnit(name, Body(clock, real_s)) for name in ("first", "middle"))
    last = Loss("last", Body(clock, real_s))
    first.reads, last.reads = (0,), (LABELS,)
    return TimedChain([first, middle, last], device, [seconds] * 3)


def test_a_pass_takes_each_unit_s_time_and_gradients_come_when_their_unit_is_done():
    clock = FakeClock()
    model = chain(clock, real_s=0.125)
    when: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: when.__setitem__(name, clock.time_s))
    for _ in range(2):
        clock.time_s, began_s = 100.0 * round(clock.time_s / 100.0 + 1), 0.0
        began_s = clock.time_s
        loss = model({0: torch.ones(2, 2), LABELS: torch.zeros(2, 2)})
        assert clock.time_s - began_s == 3 * 2.0, "three units, two samples each"
        loss.backward()
        last, middle, first = (when[f"units.{number}.unit.body.layer.weight"] - began_s for number in (2, 1, 0))
    # The second time it is known what a unit really takes, so that it computes at the end of its time.
    assert 6 + 4 - 0.125 <= last <= 6 + 4
    assert 6 + 8 - 0.125 <= middle <= 6 + 8
    assert first == 6 + 12, "nothing tells when the first unit's backward pass ends: it waits first"


def test_gradients_are_the_chain_s_own():
    model = chain(FakeClock(), real_s=0.0)
    inputs, labels = torch.randn(3, 2), torch.randn(3, 2)
    model({0: inputs, LABELS: labels}).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    units = [timed.unit for timed in model.units]
    (hidden,) = units[0](inputs)
    (hidden,) = units[1](hidden)
    units[2](hidden, labels).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_on_a_processor_nothing_is_between_the_units():
    timed = chain(FakeClock(), real_s=0.0)
    plain = UnitChain([PlainUnit(unit.unit) for unit in timed.units])
    rows = {0: torch.randn(3, 2), LABELS: torch.randn(3, 2)}
    timed(rows).backward()
    expected = [parameter.grad.clone() for parameter in timed.parameters()]
    timed.zero_grad()
    loss = plain(rows)
    assert loss.grad_fn.name() == "SumBackward0"
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, plain.parameters(), strict=True))


def test_what_a_stage_hands_on_is_no_view_which_torch_could_not_detach():
    """Its zero-bubble schedules do so when inputs have their gradients; layers of many models end in a view."""
    unit = ModuleUnit("folds", nn.Sequential(nn.Linear(2, 4), nn.Unflatten(1, (2, 2))))
    unit.reads = (0,)
    stage = StageModule([unit], is_last=False)
    stage.rows = {0: torch.randn(3, 2)}
    (output,) = stage()
    assert output.shape == (3, 2, 2)
    assert output.is_contiguous()
    output.detach_()


def test_a_processor_adds_up_what_it_computes():
    device = framework_device(CpuDevice(), "a")
    assert isinstance(device, CountingProcessor)
    assert device.run(lambda: sum(range(10**5)), None) == device.around(lambda: sum(range(10**5)))
    assert device.busy_s > device.last_s > 0
    assert device.real_s is None


def test_only_processors_and_emulated_devices_run_frameworks():
    assert isinstance(framework_device(EmulatedDevice(), "a"), StartedElsewhereDevice)

    class OtherDevice(ComputeDevice):
        def run(self, work, seconds, besides=NOTHING_MORE):
            return work()

    with pytest.raises(ConfigError, match="device gpu: other frameworks are compared on processors"):
        framework_device(OtherDevice(), "gpu")


def test_real_time_is_counted_and_overruns_are_seen():
    clock = FakeClock()
    model = chain(clock, real_s=9.0)
    device = model._device
    model({0: torch.ones(1, 2), LABELS: torch.zeros(1, 2)}).backward()
    assert device.emulated_s == 3 * (1.0 + 2.0)
    assert device.real_s == 2 * 9.0, "of all units but the first"
    assert device.overruns == 2
