"""Compare methods on one setting: same model, samples, seeds, devices and network, measured in turn."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from spantrain.app.compare_bounds import bounds_of
from spantrain.app.compare_figures import CompareOutcome, MethodFigures, Run, Setting, figures_of
from spantrain.app.compare_layouts import Layout, layouts
from spantrain.app.compare_methods import Method, MethodKind
from spantrain.app.compare_runs import WARM_UP_STEPS, Runner, median_step_s
from spantrain.app.compare_setting import (
    Scale,
    at_network_speed,
    batch_for,
    compute_to_traffic,
    cut_down,
    sound_speed,
    with_bandwidth,
)
from spantrain.app.describe import described_profile
from spantrain.app.evaluate import Evaluator
from spantrain.app.plan import PlanWishes, make_plan
from spantrain.app.predict import optimizer_state
from spantrain.app.profile import ProfileOptions, measure_profile
from spantrain.app.quick import QuickRequest, kept_profile
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.trainable import not_trained_yet
from spantrain.config.artefacts import write_profile
from spantrain.config.network_traces import NetworkTrace
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, PeerLostError, PlanError, UsageError, WorkerError
from spantrain.planner.job import JobSpec
from spantrain.planner.strategies.registry import DEFAULT_STRATEGY
from spantrain.runtime.compare.order import Framework
from spantrain.runtime.compare.reference import real_seconds_per_sample, reference_losses

__all__ = ["CompareListener", "CompareRequest", "compare"]

_TRIAL_STEPS, _TRIAL_WARM_UP = 2, 1
_PROFILE_FILE = "profile.json"


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """What is to be compared, on what."""

    cluster: Cluster
    model: ModelSpec
    methods: tuple[Method, ...]
    out: Path
    steps: int = 8
    """Of each run, the first two not measured."""
    rounds: int = 1
    """Each runs all methods once, in turn."""
    global_batch: int | None = None
    """None: eight samples for each of up to eight devices, four for each of more."""
    devices_per_site: int | None = None
    bandwidth_bytes_per_s: float | None = None
    """Of all links between sites; in a cluster of one site, between its hosts."""
    network_speed: float = 1.0
    """All rates times this, so that a small model's traffic weighs as much as a large one's."""
    emulated_speed: float | None = None
    """None: as fast as this machine can emulate, at most the cluster's own."""
    seed: int = 0
    network_trace: NetworkTrace | None = None
    """How the emulated links change in every run, from its first step on."""
    measured: bool = True
    """Plan by a measured profile; False: by data sheets, which is quicker."""

    def __post_init__(self) -> None:
        if self.steps <= WARM_UP_STEPS:
            raise ConfigError(f"--steps must be more than {WARM_UP_STEPS}, which are not measured; got {self.steps}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.rounds}")
        real = [device.name for device in self.cluster.devices if not device.emulated]
        if real:
            raise ConfigError(
                f"{', '.join(real)}: only emulated devices are the same for every method; give a preset, or a cluster "
                "file whose hosts have `backend: emulated`"
            )


class CompareListener(Reporter, Protocol):
    """A reporter that also shows rows as they come."""

    def show_scale(self, scale: Scale) -> None:
        """Show what of the setting is not life-size."""

    def show_method(self, name: str, figures: MethodFigures) -> None:
        """Show the row of a method, as far as it is known."""


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How a method is to be run."""

    run: Callable[[int], Run]
    """(round) -> figures."""
    what: str
    step_s_predicted: float | None = None


def compare(request: CompareRequest, options: SessionOptions, listener: CompareListener) -> CompareOutcome:
    """Run all methods and return their figures.

    Raises:
        ConfigError: the setting cannot be emulated.
        InfeasiblePlanError: not one of the methods can run.
        PeerLostError: the workers did not come up.
    """
    cluster, scale = _scaled(request, listener)
    request.out.mkdir(parents=True, exist_ok=True)
    names = tuple(device.name for device in cluster.devices)
    with open_session(cluster, names, options, request.out / "logs", listener) as session:
        return _Comparison(request, session, scale, listener).run()


def _scaled(request: CompareRequest, listener: CompareListener) -> tuple[Cluster, Scale]:
    """Return what this machine can emulate of the cluster, and what that left of it."""
    cluster = with_bandwidth(cut_down(request.cluster, request.devices_per_site), request.bandwidth_bytes_per_s)
    cluster = at_network_speed(cluster, request.network_speed)
    graph = described_profile(cluster, request.model).graph
    speed = request.emulated_speed
    if speed is None:
        speed = sound_speed(cluster, graph, real_seconds_per_sample(request.model))
    scaled = replace(cluster, emulated_speed=speed)
    scale = Scale(
        devices=len(cluster.devices),
        devices_before=len(request.cluster.devices),
        emulated_speed=speed,
        network_speed=request.network_speed,
        compute_to_traffic=compute_to_traffic(scaled, graph),
    )
    listener.show_scale(scale)
    return scaled, scale


class _Comparison:
    def __init__(self, request: CompareRequest, session: Session, scale: Scale, listener: CompareListener) -> None:
        self._request, self._session, self._scale, self._listener = request, session, scale, listener
        self._batch = request.global_batch or batch_for(len(session.devices))
        self._job = TrainJob(steps=request.steps, seed=request.seed, trace_steps=1, adapter="off")
        self._profile = self._known_profile()
        self._runner = Runner(
            session=session,
            profile=self._profile,
            reporter=listener,
            out=request.out,
            network_trace=request.network_trace,
        )
        self._spec = JobSpec(global_batch=self._batch, optimizer=optimizer_state(self._job))
        self._refused: dict[str, str] = {}
        self._planned: dict[str, tuple[Plan, float]] = {}
        """By strategy: its plan, and the seconds of a step that the simulator has."""
        self._same: dict[str, str] = {}
        """Methods whose plan is that of another one, which is run once for both."""

    def run(self) -> CompareOutcome:
        ways = self._ways()
        self._listener.phase("The same steps in one process, for the losses")
        reference = reference_losses(self._request.model, self._job, self._batch)
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for number in range(self._request.rounds):
            for name, way in ways.items():
                if name in self._refused:
                    continue
                self._listener.phase(f"Round {number + 1} of {self._request.rounds}: {name} ({way.what})")
                run = self._attempt(name, lambda way=way, number=number: way.run(number))  # type: ignore[misc]
                if run is not None:
                    runs[name].append(run)
                    self._listener.show_method(name, self._figures(way, runs[name], None, reference))
        return self._outcome(ways, runs, reference)

    def _known_profile(self) -> Profile:
        """Return a profile of the setting: that of an earlier comparison in the same folder, if it still holds."""
        request, session = self._request, self._session
        if not request.measured:
            return described_profile(session.cluster, request.model)
        path = request.out / _PROFILE_FILE
        asked = QuickRequest(cluster=session.cluster, model=request.model, job=self._job, out=request.out)
        profile = kept_profile(path, session.network, asked)
        if profile is None:
            profile = measure_profile(session, request.model, ProfileOptions(), self._listener)
            write_profile(profile, path)
        return profile

    def _ways(self) -> dict[str, _Way]:
        found: dict[str, _Way] = {}
        plans: dict[str, tuple[Plan, str]] = {}
        for method in self._request.methods:
            try:
                if method.kind is MethodKind.FRAMEWORK:
                    found[method.name] = self._framework(Framework(method.name))
                    continue
                plan, step_s = self._plan(method)
            except (UsageError, WorkerError, PeerLostError) as error:
                self._refuse(method.name, str(error))
                continue
            twin = next((name for name, other in plans.items() if _alike((plan, method.adapter), other)), None)
            if twin is not None:
                self._same[method.name] = twin
                continue
            plans[method.name] = plan, method.adapter
            found[method.name] = self._ours(method, plan, step_s)
        return found

    def _framework(self, framework: Framework) -> _Way:
        """Return the best of the ways to set a framework up, each tried for real."""
        tried = layouts(framework, self._profile, self._batch, Evaluator(self._profile, self._spec))
        chosen = tried[0] if len(tried) == 1 else self._fastest(tried)
        return _Way(run=lambda _number: self._runner.framework(chosen, self._job), what=chosen.what)

    def _fastest(self, tried: Sequence[Layout]) -> Layout:
        job, calm = replace(self._job, steps=_TRIAL_STEPS), replace(self._runner, network_trace=None)
        seconds: dict[int, float] = {}
        for number, layout in enumerate(tried):
            self._listener.phase(f"Trying {layout.framework}: {layout.what}")
            seconds[number] = median_step_s(calm.framework(layout, job, _TRIAL_WARM_UP))
        return tried[min(seconds, key=lambda number: seconds[number])]

    def _plan(self, method: Method) -> tuple[Plan, float]:
        if method.strategy in self._planned:
            return self._planned[method.strategy]
        self._listener.phase(f"Planning: {method.name}")
        outcome = make_plan(self._profile, self._spec, PlanWishes(strategies=(method.strategy,)))
        if problems := not_trained_yet(outcome.plan):
            raise PlanError(f"its plan cannot be trained: {'; '.join(problems)}")
        self._planned[method.strategy] = outcome.plan, outcome.step_s_predicted
        return self._planned[method.strategy]

    def _ours(self, method: Method, plan: Plan, step_s: float) -> _Way:
        job = replace(self._job, adapter=method.adapter)
        return _Way(
            run=lambda number: self._runner.plan(plan, job, f"{method.name}-{number + 1}"),
            what=_plan_text(plan) + ("" if method.adapter == "off" else f", adapter {method.adapter}"),
            step_s_predicted=step_s,
        )

    def _attempt(self, name: str, run: Callable[[], Run]) -> Run | None:
        """Run a method; one that fails is refused from then on, and the others go on."""
        try:
            return run()
        except (UsageError, WorkerError, PeerLostError) as error:
            if self._session.workers is not None:
                self._session.workers.check()  # a worker that has ended is no matter of one method
            self._refuse(name, str(error))
            return None

    def _refuse(self, name: str, reason: str) -> None:
        self._refused[name] = reason
        self._listener.note(f"{name} does not run here: {reason}")

    def _figures(
        self, way: _Way, runs: Sequence[Run], first: float | None, reference: Sequence[float]
    ) -> MethodFigures:
        return figures_of(
            runs,
            what=way.what,
            global_batch=self._batch,
            first_samples_per_s=first,
            reference=reference,
            changing=self._request.network_trace is not None,
            step_s_predicted=way.step_s_predicted,
        )

    def _outcome(
        self, ways: Mapping[str, _Way], runs: Mapping[str, Sequence[Run]], reference: Sequence[float]
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
            # By what emulated devices and links are told to be: measurements on a busy machine would make no bounds.
            bounds=bounds_of(described_profile(cluster, self._request.model), self._batch, plan),
            setting=Setting(
                cluster=cluster.name,
                model=self._request.model.name,
                methods=tuple(method.name for method in self._request.methods if method.name in rows),
                global_batch=self._batch,
                steps=self._request.steps,
                warm_up_steps=WARM_UP_STEPS,
                rounds=self._request.rounds,
                optimizer=self._job.optimizer,
                seed=self._job.seed,
                planned_by="a measured profile" if self._request.measured else "data sheets",
                network=self._session.network,
                network_trace="" if self._request.network_trace is None else self._request.network_trace.text,
                scale=self._scale,
                cores=len(os.sched_getaffinity(0)),
            ),
            emulated=_emulated_text(len(cluster.devices), self._session.network),
        )


def _emulated_text(devices: int, network: str) -> str:
    links = "emulated (real TCP through a shaping router)" if network == "testbed" else network
    return (
        f"devices: all {devices} emulated, alike for every method (real computation, made-up time); links: {links}; "
        "gradients, losses, messages: real"
    )


def _alike(one: tuple[Plan, str], other: tuple[Plan, str]) -> bool:
    """Whether two plans with their adapters are the same run."""
    first, second = ((plan.stages, plan.schedule, plan.hints, adapter) for plan, adapter in (one, other))
    return first == second


def _plan_text(plan: Plan) -> str:
    sizes = [max(span.size for span in stage.micro_batches) for stage in plan.stages]
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    return f"{stages} on {len(plan.devices)} devices, micro-batches of {max(sizes)}, {plan.schedule}"
