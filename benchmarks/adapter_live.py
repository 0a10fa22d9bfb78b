"""The live part of `adapter.py`: plans on the testbed, whose links follow a trace."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.train import StopRequest, TrainRequest, train
from spantrain.config.changes_file import read_changes
from spantrain.config.network_traces import network_trace
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, WireFormat
from spantrain.core.profile import Profile

Run = tuple[tuple[tuple[float, float], ...], tuple[float, float], tuple[str, ...], tuple[float, ...]]
"""When each step began and its seconds; from when to when links were slow; changes of plan; losses."""


class Runs:
    """Runs of one case; each has workers and a network of its own."""

    def __init__(self, profile: Profile, folder: Path, steps: int, left: float) -> None:
        self._profile, self._folder, self._steps = profile, folder, steps
        self._trace = network_trace(f"drop-{100 * (1 - left):g}")

    def run(self, plan: Plan, name: str, adapter: str, allowed: Sequence[WireFormat], seed: int) -> Run:
        """Train a plan."""
        folder = self._folder / re.sub(r"\W+", "-", f"{plan.model.name} {name} {seed}")
        request = TrainRequest(
            plan=replace(plan, generation=1),
            profile=self._profile,
            profile_path="",
            job=TrainJob(steps=self._steps, seed=seed, adapter=adapter, allow_wire=tuple(allowed)),
            schedule=plan.schedule,
            out=folder,
            checkpoints=False,
            network_trace=self._trace,
        )
        with open_session(plan.cluster, plan.devices, SessionOptions(), folder / "logs", SilentReporter()) as session:
            outcome = train(session, request, StopRequest(), SilentReporter())
        figures = outcome.network_trace
        assert figures is not None, "the run had a trace"
        ends = (0.0, *figures.step_ends_s)
        changes = next(iter(read_changes(Path(figures.file)).link_speed.values())).changes
        return (
            tuple((begin_s, end_s - begin_s) for begin_s, end_s in pairwise(ends)),
            (changes[0][0], changes[-1][0]),
            tuple(str(change) for change in outcome.plan_changes),
            outcome.losses,
        )
