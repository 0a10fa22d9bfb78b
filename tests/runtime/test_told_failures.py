"""What a worker tells of an order that failed, and what the coordinator makes of it."""

import pytest
import torch
from torch.distributed import DistNetworkError

from spantrain.errors import ConfigError, InternalError, PeerLostError, UsageError, WorkerError
from spantrain.models.build import build_units
from spantrain.models.catalog.catalog import resolve_model
from spantrain.recovery.policy import DeviceFailed, EndOnLoss
from spantrain.runtime.control.requests import GivenOrder, Standing
from spantrain.runtime.coordinator.roster import DeviceMemoryError, error_of
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.runtime.worker.watch import Watch
from spantrain.runtime.worker.worker import Worker, told
from testing.models import brought_models


def raised(error: BaseException, log: str = "logs/a.log"):
    """The error of a run whose first device told this one."""
    return error_of("a", told(error), log)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("units"), InternalError),
        (AssertionError(), InternalError),
        (RuntimeError("shape '[2]' is invalid"), InternalError),
        (RecursionError(), InternalError),
        (ConfigError("data x: is not there"), UsageError),
        (WorkerError("the loss is nan"), WorkerError),
        (OSError(28, "No space left on device"), WorkerError),
        (MemoryError(), DeviceMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] can't allocate memory"), DeviceMemoryError),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), WorkerError),
        (DistNetworkError("timed out"), WorkerError),
    ],
)
def test_whose_error_it_was(error, kind):
    found = raised(error)
    assert type(found) is kind
    assert found.exit_code == {InternalError: 70, UsageError: 2}.get(kind, 1)
    assert "device a" in str(found)
    if kind is not UsageError:
        assert "logs/a.log" in str(found)


def test_an_internal_error_says_where_the_traceback_is():
    assert "RuntimeError: odd; the traceback is in its log: logs/a.log; to report the error" in str(
        raised(RuntimeError("odd"))
    )


def test_a_device_that_another_ones_error_stopped_is_not_named():
    policy = EndOnLoss(("a", "b"))
    for name, cause in (("a", PeerLostError("b has gone")), ("b", KeyError("x"))):
        failure = told(cause)
        commands = policy.on_event(0.0, DeviceFailed(name, error_of(name, failure, ""), failure.caused_elsewhere))
        assert len(commands) == (name == "b")
    assert "device b" in str(commands[0].error)


def test_one_that_blames_others_ends_the_run_when_none_of_them_was_lost():
    policy = EndOnLoss(("a", "b"), 30.0)
    assert policy.on_time(5.0) == ()
    assert policy.on_event(10.0, DeviceFailed("a", PeerLostError("b cannot be reached"), caused_elsewhere=True)) == ()
    assert policy.on_time(39.0) == ()
    (command,) = policy.on_time(40.0)
    assert "b cannot be reached" in str(command.error)


def test_the_models_own_code_is_named_with_its_line():
    first, *_ = build_units(resolve_model(f"{brought_models.__file__}:recurrent"), seed=0)
    with pytest.raises(RuntimeError) as caught:
        first(torch.zeros(2, 5, brought_models.WIDTH + 1))
    found = raised(caught.value)
    assert type(found) is WorkerError
    assert "the model's own code failed on these samples: RuntimeError: input.size(-1) must be equal" in str(found)


def test_an_order_that_cannot_be_read_is_told_with_the_machine_at_fault():
    outcome = worker_a()._carry_out(GivenOrder(order_id=3, name="connect", body={"generation": 1, "peers": [], "x": 1}))
    said = str(error_of("a", outcome.failure, "logs/a.log"))
    assert said.startswith("device a failed: order connect: x: unknown key 'x'; known: generation, peers; its log: ")


def test_a_worker_outlives_an_order_that_it_does_not_know():
    outcome = worker_a()._carry_out(GivenOrder(order_id=3, name="dance", body={}))
    assert not outcome.failure.internal
    assert outcome.failure.error.startswith("no order 'dance' here; install the same packages on this machine")


def worker_a() -> Worker:
    """One that has joined nobody."""
    settings = WorkerSettings(join="", token="", name="a", backend="cpu", data_address="127.0.0.1", encrypted=False)
    worker = Worker(settings)
    worker._watch = Watch(Standing, interrupt=lambda: None, give_up=lambda _: None)
    return worker
