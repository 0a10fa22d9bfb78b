"""Compare methods on one setting: same model, samples, seeds, devices and network, measured in turn, beside bounds."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from spantrain.app.profiling.describe import described_profile
from spantrain.app.profiling.profile import ProfileOptions, measure_profile
from spantrain.app.profiling.rehearsal import rehearse
from spantrain.app.profiling.slowing import real_seconds_per_sample
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.run_folder import alone_in, refuse_run
from spantrain.app.training.train_from_scratch import ScratchRequest, kept_profile
from spantrain.config.artefacts import write_profile
from spantrain.config.traces.network_traces import NetworkTrace
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_seconds
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, InternalError, PeerLostError, PlanError, UsageError, WorkerError
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec
from spantrain.planner.strategies.registry import DEFAULT_STRATEGY
from spantrain.schedule.joint import joint_refusal
from spantrain_studies.comparison.bounds import bounds_of
from spantrain_studies.comparison.figures import (
    WARM_UP_STEPS,
    ComparedSetting,
    CompareOutcome,
    MeasuredRun,
    MethodFigures,
    Scale,
    figures_of,
    plan_text,
    steps_within,
    worth_trying,
)
from spantrain_studies.comparison.fit import Fitted, SettingOverrides, fit
from spantrain_studies.comparison.layouts import Layout, layouts
from spantrain_studies.comparison.methods import Method, MethodKind
from spantrain_studies.comparison.real import as_it_is, emulated_text, refuse_mixed, refuse_scaling, shared_text
from spantrain_studies.comparison.runs import Runner, median_step_s
from spantrain_studies.comparison.worker.orders import Framework
from spantrain_studies.comparison.worker.reference import reference_losses, rounding_error


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """How ways to set a framework up are tried for real."""

    ways: int
    """So many, those that promise most."""
    steps: int
    """Of each."""
    warm_up_steps: int


_EMULATED_TRIALS = _Trials(ways=2, steps=2, warm_up_steps=1)
"""One step of a device in made-up time is like another."""
_REAL_TRIALS = _Trials(ways=4, steps=10, warm_up_steps=2)
"""Of a processor it is not, nor are units measured one by one as quick as many at once."""
_PROFILE_FILE = "profile.json"
_FEW_STEPS = 8
"""So many leave no time for rounding to be enlarged."""


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """What is to be compared, on what."""

    cluster: Cluster
    model: ModelSpec
    methods: tuple[Method, ...]
    out: Path
    overrides: SettingOverrides = field(default_factory=SettingOverrides)
    """How the setting is to be fitted to this machine."""
    steps: int = 8
    """Steps of each run, the first two not measured."""
    rounds: int = 1
    """Each runs all methods once, in turn."""
    seconds_per_method: float = 15.0
    """A method whose steps take longer runs fewer of them, one at least; one of very few in the first round only."""
    seed: int = 0
    network_trace: NetworkTrace | None = None
    """How the emulated links change in every run, from its first step on."""
    measured: bool = False
    """Plan by a measured profile, as for real devices always; False: by data sheets, which emulated devices and links
    follow anyhow, and what the runtime takes."""

    def __post_init__(self) -> None:
        if self.steps <= WARM_UP_STEPS:
            raise ConfigError(f"--steps must be more than {WARM_UP_STEPS}, which are not measured; got {self.steps}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.rounds}")
        speeds = {"--emulated-speed": self.overrides.emulated_speed, "--network-speed": self.overrides.network_speed}
        for option, value in {"--seconds-per-method": self.seconds_per_method, **speeds}.items():
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{option} must be positive and finite, got {value}")
        refuse_mixed(self.cluster)
        if not self.cluster.emulated:
            refuse_scaling(self.cluster, self.overrides)
        if self.network_trace is not None and len(self.cluster.hosts) == 1:
            raise ConfigError(
                f"--network-trace {self.network_trace.text}: all devices are on host {self.cluster.hosts[0].name}, so "
                "there is no link to change; leave it out, or give a cluster of several hosts"
            )


class CompareListener(Reporter):
    """A reporter that also shows rows as they come."""

    def show_scale(self, scale: Scale) -> None:
        """Show what of the setting is not life-size."""

    def show_method(self, name: str, figures: MethodFigures) -> None:
        """Show the row of a method, as far as it is known."""

    def ends_early(self, outcome: CompareOutcome) -> None:
        """Take what was measured where the rest is not: on Ctrl-C, or since a worker has gone."""


@dataclass(frozen=True, kw_only=True)
class _MethodRun:
    """How a method is to be run."""

    run: Callable[[int, TrainJob, int], MeasuredRun]
    """(round, what to train, steps not measured) -> figures."""
    what: str
    step_s_simulated: float
    ours: bool
    """Whether our planner made the plan, so that its prediction is shown."""


def compare(request: CompareRequest, options: SessionOptions, listener: CompareListener) -> CompareOutcome:
    """Run all methods and return their figures.

    Raises:
        ConfigError: the setting cannot be emulated, or the folder holds a run.
        InfeasiblePlanError: not one of the methods can run.
        PeerLostError: the workers did not come up.
    """
    refuse_run(request.out, "a comparison needs a folder of its own: name another one with --out")
    fitted = _fitted(request)
    listener.show_scale(fitted.scale)
    if not fitted.cluster.emulated and (shared := shared_text(len(fitted.cluster.devices))):
        listener.note(f"Note: {shared}")
    names = tuple(device.name for device in fitted.cluster.devices)
    where = request.out
    with alone_in(where), open_session(fitted.cluster, names, options, where / "logs", listener) as session:
        return _Comparison(request, session, fitted, listener).run()


def _fitted(request: CompareRequest) -> Fitted:
    if not request.cluster.emulated:
        return as_it_is(request.cluster, request.overrides)
    return fit(request.cluster, request.model, request.overrides, partial(real_seconds_per_sample, request.model))


class _Comparison:
    def __init__(self, request: CompareRequest, session: Session, fitted: Fitted, listener: CompareListener) -> None:
        self._request, self._session, self._scale, self._listener = request, session, fitted.scale, listener
        self._batch = fitted.global_batch
        self._job = TrainJob(steps=request.steps, seed=request.seed, trace_steps=1, adapter="off", batch_norm="frozen")
        self._profile = self._known_profile()
        self._runner = Runner(
            session=session,
            profile=self._profile,
            reporter=listener,
            out=request.out,
            network_trace=request.network_trace,
        )
        self._spec = JobSpec(global_batch=self._batch, optimizer=self._job.optimizer_state)
        self._refused: dict[str, str] = {}
        self._planned: dict[str, tuple[Plan, float]] = {}
        """By strategy: its plan, and the seconds of a step that the simulator has."""
        self._same: dict[str, str] = {}
        """Methods whose plan is that of another one, which is run once for both."""

    def run(self) -> CompareOutcome:
        for line in self._left_out():
            self._listener.note(f"Not as the model was given: {line}")
        ways = self._ways()
        self._listener.phase("The same steps in one process, for the losses")
        reference = reference_losses(self._request.model, self._job, self._batch)
        runs: dict[str, list[MeasuredRun]] = {name: [] for name in ways}
        try:
            self._measure(ways, runs, reference)
        except BaseException:
            if any(runs.values()):
                self._listener.ends_early(replace(self._outcome(ways, runs, reference), is_complete=False))
            raise
        outcome = self._outcome(ways, runs, reference)
        if self._request.steps <= _FEW_STEPS:
            return outcome
        self._listener.phase("The same steps in one process, its batch cut otherwise, for what rounding makes of them")
        rounded = rounding_error(self._request.model, self._job, self._batch, reference)
        return replace(outcome, rounding_error=rounded)

    def _measure(
        self, ways: Mapping[str, _MethodRun], runs: Mapping[str, list[MeasuredRun]], reference: Sequence[float]
    ) -> None:
        """Run each method once a round, and add the runs to those of its name as they end."""
        for number in range(self._request.rounds):
            for name, way in ways.items():
                if name not in self._refused and (run := self._run(number, name, way, runs[name])) is not None:
                    runs[name].append(run)
                    self._listener.show_method(name, self._figures(way, runs[name], None, reference))

    def _left_out(self) -> tuple[str, ...]:
        model = self._request.model
        weights = (f"all methods begin with the same random weights; none are read from {model.source}",)
        frozen = self._job.about_statistics(model, self._profile.graph)
        return (
            *(weights if model.family == "hf" else ()),
            *self._profile.graph.left_out,
            *((frozen,) if frozen else ()),
        )

    def _run(self, number: int, name: str, way: _MethodRun, before: Sequence[MeasuredRun]) -> MeasuredRun | None:
        """Run a method for as long as it may take; None: not any more, or it cannot run."""
        most_s = self._request.seconds_per_method
        step_s = median_step_s(before[-1]) if before else way.step_s_simulated
        steps, warm_up_steps = steps_within(self._request.steps, step_s, most_s)
        if before and warm_up_steps < WARM_UP_STEPS:
            return None
        about = f"{name} ({way.what}), {steps} steps of about {format_seconds(step_s)}"
        self._listener.phase(f"Round {number + 1} of {self._request.rounds}: {about}")
        return self._attempt(name, lambda: way.run(number, replace(self._job, steps=steps), warm_up_steps))

    def _known_profile(self) -> Profile:
        """Return a profile of the setting: that of an earlier comparison in the same folder, if it still holds."""
        request, session = self._request, self._session
        if not self._measured:
            described = described_profile(session.cluster, request.model)
            self._listener.phase("Measuring the runtime: a few steps of a small model")
            return replace(described, runtime=rehearse(session, described.link_by_pair.values()))
        path = request.out / _PROFILE_FILE
        asked = ScratchRequest(cluster=session.cluster, model=request.model, job=self._job, out=request.out)
        profile = kept_profile(path, session.network, asked)
        if profile is None:
            # What processors took another day, beside other programs, is no measure of today's.
            options = ProfileOptions(use_cache=session.cluster.emulated)
            profile = measure_profile(session, request.model, options, self._listener)
            write_profile(profile, path)
        return profile

    @property
    def _measured(self) -> bool:
        return self._request.measured or not self._session.cluster.emulated

    def _ways(self) -> dict[str, _MethodRun]:
        found: dict[str, _MethodRun] = {}
        plans: dict[str, tuple[Plan, str]] = {}
        for method in self._request.methods:
            try:
                if method.kind is MethodKind.FRAMEWORK:
                    found[method.name] = self._framework(Framework(method.name))
                    continue
                plan, step_s = self._plan(method)
            except (UsageError, WorkerError, InternalError, PeerLostError) as error:
                self._refuse(method.name, str(error))
                continue
            twin = next((name for name, other in plans.items() if _alike((plan, method.adapter), other)), None)
            if twin is not None:
                self._same[method.name] = twin
                continue
            plans[method.name] = plan, method.adapter
            found[method.name] = self._ours(method, plan, step_s)
        return found

    def _framework(self, framework: Framework) -> _MethodRun:
        """Return the best of the ways to set a framework up, each tried for real where there is time for it."""
        evaluate = Evaluator(self._profile, self._spec)
        trials = _EMULATED_TRIALS if self._session.cluster.emulated else _REAL_TRIALS
        tried = layouts(framework, self._profile, self._batch, evaluate)[: trials.ways]
        step_s = evaluate(tried[0].plan).step_s
        chosen = tried[0]
        if len(tried) > 1 and worth_trying(step_s, self._request.seconds_per_method, len(tried) * trials.steps):
            chosen = self._fastest(tried, trials)
        return _MethodRun(
            run=lambda _number, job, warm_up_steps: self._runner.framework(chosen, job, warm_up_steps),
            what=chosen.what,
            step_s_simulated=step_s,
            ours=False,
        )

    def _fastest(self, tried: Sequence[Layout], trials: _Trials) -> Layout:
        job, calm = replace(self._job, steps=trials.steps), replace(self._runner, network_trace=None)
        seconds: dict[int, float] = {}
        for number, layout in enumerate(tried):
            self._listener.phase(f"Trying {layout.framework}: {layout.what}")
            seconds[number] = median_step_s(calm.framework(layout, job, trials.warm_up_steps))
        return tried[min(seconds, key=lambda number: seconds[number])]

    def _plan(self, method: Method) -> tuple[Plan, float]:
        if method.strategy in self._planned:
            return self._planned[method.strategy]
        self._listener.phase(f"Planning: {method.name}")
        # The default is what `spantrain plan` chooses when it is free to, which may be the best site's plan.
        asked = () if method.strategy == DEFAULT_STRATEGY else (method.strategy,)
        outcome = make_plan(self._profile, self._spec, PlanOptions(strategies=asked))
        if refusal := joint_refusal(outcome.plan):
            raise PlanError(f"its plan cannot be trained: {refusal}")
        self._planned[method.strategy] = outcome.plan, outcome.step_s_predicted
        return self._planned[method.strategy]

    def _ours(self, method: Method, plan: Plan, step_s: float) -> _MethodRun:
        def run(number: int, job: TrainJob, warm_up_steps: int) -> MeasuredRun:
            adapted = replace(job, adapter=method.adapter)
            return self._runner.plan(plan, adapted, f"{method.name}-{number + 1}", warm_up_steps)

        what = plan_text(plan) + ("" if method.adapter == "off" else f", adapter {method.adapter}")
        return _MethodRun(run=run, what=what, step_s_simulated=step_s, ours=True)

    def _attempt(self, name: str, run: Callable[[], MeasuredRun]) -> MeasuredRun | None:
        """Run a method; one that fails is refused from then on, and the others go on."""
        try:
            return run()
        except (UsageError, WorkerError, InternalError, PeerLostError) as error:
            if self._session.coordinator.missing(self._session.devices):
                raise  # a worker that has gone is no matter of one method
            self._refuse(name, str(error))
            return None

    def _refuse(self, name: str, reason: str) -> None:
        self._refused[name] = reason
        self._listener.note(f"{name} does not run here: {reason}")

    def _figures(
        self, way: _MethodRun, runs: Sequence[MeasuredRun], first: float | None, reference: Sequence[float]
    ) -> MethodFigures:
        return figures_of(
            runs,
            what=way.what,
            global_batch=self._batch,
            first_samples_per_s=first,
            reference=reference,
            changing=self._request.network_trace is not None,
            step_s_predicted=way.step_s_simulated if way.ours else None,
        )

    def _outcome(
        self, ways: Mapping[str, _MethodRun], runs: Mapping[str, Sequence[MeasuredRun]], reference: Sequence[float]
    ) -> CompareOutcome:
        rows: dict[str, MethodFigures] = {}
        for method in self._request.methods:
            name = self._same.get(method.name, method.name)
            if name in self._refused or not runs.get(name):
                continue
            first = next(iter(rows.values())).samples_per_s if rows else None
            row = self._figures(ways[name], runs[name], first, reference)
            rows[method.name] = row if name == method.name else replace(row, what=f"as {name}: the same plan")
        cluster = self._session.cluster
        plan, _ = self._planned.get(DEFAULT_STRATEGY, (None, 0.0))
        return CompareOutcome(
            methods=rows,
            refused=self._refused,
            bounds=bounds_of(
                described_profile(cluster, self._request.model),
                self._batch,
                plan,
                shaped=self._session.testbed is not None or len(cluster.hosts) == 1,
            ),
            setting=ComparedSetting(
                cluster=cluster.name,
                model=self._request.model.name,
                methods=tuple(method.name for method in self._request.methods if method.name in rows),
                global_batch=self._batch,
                steps=self._request.steps,
                warm_up_steps=WARM_UP_STEPS,
                rounds=self._request.rounds,
                seconds_per_method=self._request.seconds_per_method,
                optimizer=self._job.optimizer,
                seed=self._job.seed,
                planned_by="a measured profile" if self._measured else "data sheets and a rehearsal",
                network=self._session.network,
                network_trace="" if self._request.network_trace is None else self._request.network_trace.text,
                scale=self._scale,
                cores=len(os.sched_getaffinity(0)),
            ),
            left_out=self._left_out(),
            emulated=emulated_text(cluster, self._session.network),
        )


def _alike(one: tuple[Plan, str], other: tuple[Plan, str]) -> bool:
    """Whether two plans with their adapters are the same run."""
    first, second = ((plan.stages, plan.schedule, plan.hints, adapter) for plan, adapter in (one, other))
    return first == second
