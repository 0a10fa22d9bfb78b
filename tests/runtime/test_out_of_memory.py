"""A device runs out of memory: the run goes on with less on it, and its losses are one device's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spantrain.app.planning import protection
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.recovery.carry_on import Leg, setback_of
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.artefacts import read_plan_report, write_profile
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.errors import PlanError, WorkerError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.choice import user_functions
from spantrain.recovery.policy import OnLoss
from spantrain.runtime.control.orders import KeptState
from spantrain.runtime.control.requests import OrderFailure
from spantrain.runtime.coordinator.barrier import StepBarrier
from spantrain.runtime.coordinator.roster import DeviceMemoryError
from spantrain.runtime.worker import plan_part, stale_session
from testing.models import hungry
from testing.runtime import sessions
from testing.runtime.runs import OneProcess
from testing.runtime.sessions import train_in_threads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
JOB = TrainJob(steps=5, seed=5, learning_rate=0.01, adapter="off")


@dataclass
class Told(SilentReporter):
    """Notes what is said."""

    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def run(make_plan, law_profile, tmp_path):
    """Two stages of one device, the first of which has to hold two micro-batches, and holds one."""
    torch.set_num_threads(1)

    def run(name: str, **more):
        spec = resolve_model(f"{hungry.__file__}:{name}")
        plan = make_plan(spec, [0, 2, 3], [[1], [1]], [THIRDS] * 2, "1f1b")
        profile, told = law_profile(plan.cluster, plan.model), Told()
        write_profile(profile, tmp_path / "profile.json")
        request = TrainRequest(
            plan=plan, profile=profile, profile_path=str(tmp_path / "profile.json"), job=JOB, out=tmp_path,
            options=RunOptions(**more),
        )  # fmt: skip
        options = SessionOptions(network=False, functions=user_functions(spec))
        with open_session(plan.cluster, plan.devices, options, tmp_path / "logs", told) as session:
            outcome = train(session, request, StopRequest(), told)
        return plan, outcome, told

    return run


@pytest.mark.parametrize(("name", "step"), [("hungry", 1), ("hungry_later", 2)])
def test_a_run_goes_on_with_less(name: str, step: int, run, tmp_path: Path) -> None:
    plan, outcome, told = run(name)
    wanted = OneProcess(plan.model, JOB, 6).train(0, JOB.steps)
    assert outcome.losses == pytest.approx(wanted, abs=1e-4)
    assert hungry.SMALL in outcome.devices
    first = outcome.plan_changes[0]
    assert first.reason.startswith(f"{hungry.SMALL} ran out of memory (OutOfMemoryError: CUDA out of memory.")
    assert re.search(f"and is planned with .* from now on: step {step} is trained again, ", first.reason), first.reason
    assert read_plan_report(tmp_path / first.plan).reasons == (first.reason,)
    assert any(note.startswith("Training goes on after") for note in told.notes)


def test_a_run_ends_where_that_is_wanted(run) -> None:
    with pytest.raises(WorkerError, match="device s0r0 ran out of memory: OutOfMemoryError: CUDA out of memory"):
        run("hungry", on_loss=OnLoss.END)


def test_a_run_ends_where_no_plan_needs_less(run, monkeypatch) -> None:
    def no_plan(*_: object, **_more: object) -> None:
        raise PlanError("s0r0 needs 5 GiB")

    monkeypatch.setattr(protection, "light_plan", no_plan)
    with pytest.raises(WorkerError, match="with less memory there: no plan fits the devices that are left: s0r0 needs"):
        run("hungry")


def test_who_ran_out_of_memory_in_its_update_stays_and_holds_nothing(make_plan, spec_of) -> None:
    """What an update failed half-way on is no step's: others have to hold it."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [THIRDS] * 2, "1f1b")
    barrier = StepBarrier(
        plan=plan, job=JOB, stop_requested=lambda: False, on_step=lambda _: None, can_checkpoint=False,
    )  # fmt: skip
    told = {
        "s0r0": OrderFailure(error="CUDA out of memory", out_of_memory=True, holds=False),
        "s1r0": OrderFailure(error="s0r0 is over", caused_elsewhere=True),
    }

    class Left:
        def settle(self, names: Sequence[str]) -> tuple[str, ...]:
            return tuple(names)

        def failures(self) -> dict[str, OrderFailure]:
            return told

        def holders(self, _step: int) -> tuple[str, ...]:
            return ()

    error = DeviceMemoryError("s0r0 ran out of memory", device="s0r0", why="CUDA out of memory")
    session = SimpleNamespace(coordinator=Left(), workers=None)
    found = setback_of(error, Leg(plan=plan, first_step=0), barrier, session, StopRequest(), lambda _: None)
    assert found.holders == ("s1r0",)
    assert found.short == {"s0r0": "CUDA out of memory"}


def test_what_was_updated_in_part_is_held_by_nobody(make_plan, spec_of, monkeypatch) -> None:
    made = []

    def session_of(*given):
        made.append(stale_session.session_of(*given))
        return made[-1]

    def update(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(sessions, "session_of", session_of)
    monkeypatch.setattr(plan_part, "update", update)
    with pytest.raises(MemoryError):
        train_in_threads(make_plan(spec_of("gpt2"), [0, 5], [[1]], [THIRDS], "1f1b"), JOB)
    (session,) = made
    assert not session.is_whole
    assert session.leave(KeptState(verdict=None), 1) is None
