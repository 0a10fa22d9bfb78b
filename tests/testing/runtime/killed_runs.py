"""Runs whose workers are killed while they train, and what their losses must be."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from spantrain.app.live_requests import ask_to_drain
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.artefacts import write_profile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.shares import StateSharding
from spantrain.core.span import Span
from spantrain.runtime.coordinator.barrier import StepOutcome
from testing.runtime.kills import kill
from testing.runtime.runs import OneProcess

BATCH = 6
THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
JOB = TrainJob(steps=9, seed=5, learning_rate=0.01, warmup_steps=5, max_grad_norm=0.5, trace_steps=1, adapter="off")
LONG = replace(JOB, steps=100_000, learning_rate=0.001)
"""Until the run is asked to stop: who makes it wait decides how long it is, and rounding may not grow that fast."""
TOLERANCE = 1e-4
READY = "All devices are ready"


@dataclass
class Killer(SilentReporter):
    """Kills devices: each when a text is noted, or when the step of a number has ended."""

    victims: dict[int | str, str]
    notes: list[str] = field(default_factory=list)
    logs: Path = Path()
    back: dict[int | str, str] = field(default_factory=dict)
    """Devices whose workers are started again, and when."""
    drained: dict[int | str, str] = field(default_factory=dict)
    session: Session | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    last: str = ""
    """What is noted five steps before the run is asked to stop, if anything."""
    left: int | None = None

    def step(self, outcome: StepOutcome, _metrics: object, total_steps: int) -> None:
        self._strike(lambda when: when == outcome.step)
        if self.left is not None:
            self.left -= 1
        if self.left == 0:
            self.stop.ask()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._strike(lambda when: isinstance(when, str) and when in text)
        if self.last and self.last in text:
            self.left = 5

    def _strike(self, is_time: Callable[[int | str], bool]) -> None:
        for when in [when for when in self.victims if is_time(when)]:
            kill(self.logs / f"{self.victims.pop(when)}.log")
        for when in [when for when in self.drained if is_time(when)]:
            ask_to_drain(self.logs.parent, self.drained.pop(when))
        for when in [when for when in self.back if is_time(when)]:
            # In a thread: the last worker may end only when this one has told it to.
            threading.Thread(target=self.session.start_again, args=(self.back.pop(when),), daemon=True).start()


class KilledRuns:
    """Trains with a killer at work, and compares losses with those of one process."""

    def __init__(self, make_plan, spec_of, law_profile, tmp_path_factory) -> None:
        """Take the fixtures of these names."""
        torch.set_num_threads(1)
        self._make_plan, self._spec_of, self._law_profile = make_plan, spec_of, law_profile
        self._folders = tmp_path_factory

    def __call__(
        self, killer: Killer, cuts, replicas, *, job: TrainJob = JOB, speed=1.0, state=StateSharding.NONE, **options
    ) -> tuple[Plan, TrainOutcome]:
        plan = self._make_plan(self._spec_of("gpt2"), cuts, replicas, [THIRDS] * len(replicas), "1f1b")
        plan = replace(plan, stages=tuple(replace(stage, state_sharding=state) for stage in plan.stages))
        plan = replace(plan, cluster=replace(plan.cluster, emulated_speed=speed))
        out = self._folders.mktemp("run")
        killer.logs = out / "logs"
        profile = self._law_profile(plan.cluster, plan.model)
        write_profile(profile, out / "profile.json")
        request = TrainRequest(
            plan=plan, profile=profile, profile_path=str(out / "profile.json"), job=job, out=out,
            options=RunOptions(**options),
        )  # fmt: skip
        with open_session(plan.cluster, plan.devices, SessionOptions(network=False), out / "logs", killer) as session:
            killer.session = session
            outcome = train(session, request, killer.stop, killer)
        assert (killer.victims, killer.back, killer.drained) == ({}, {}, {})
        wanted = OneProcess(plan.model, job, BATCH).train(0, outcome.steps)
        assert outcome.losses == pytest.approx(wanted, abs=TOLERANCE)
        return plan, outcome
