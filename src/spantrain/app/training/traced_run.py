"""The network of a run: on a testbed its links may follow a trace, which leaves something for a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from spantrain.app.simulation.simulate import calm_run_s, simulate_traced
from spantrain.config.traces.network_traces import Changes, NetworkTrace, network_links, write_changes
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.speed import SpeedTrace
from spantrain.errors import ConfigError
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.testbed.testbed import Testbed

TRACE_NAME = "network-trace.yaml"
_MAX_PREDICTED_STEPS = 1000


class NetworkTraceFigures(Record):
    """What the network did during a run, and what its steps did; times since the first step's begin."""

    trace: str
    """As it was asked for."""
    file: str
    """The same in the form that `--network-trace` reads, in the run's folder."""
    run_s: float
    """What the run was expected to take on the normal network; times that are parts of the run are parts of this."""
    bytes_per_s: Mapping[str, tuple[tuple[float, float], ...]]
    """By link: (seconds, bytes per second from then on)."""
    step_ends_s: tuple[float, ...]
    """When each step ended."""
    predicted_step_ends_s: tuple[float, ...]
    """When the simulator has it end, with this trace and the plan that the run began with."""


class RunNetwork:
    """The network of a run: it follows a trace on a testbed, or stays as it is where there is no trace."""

    def __init__(self, trace: NetworkTrace | None, testbed: Testbed | None, plan: Plan, profile: Profile) -> None:
        """Take what the run is made of.

        Raises:
            ConfigError: there is a trace, and the run is not on an emulated network.
        """
        if trace is not None and testbed is None:
            raise ConfigError(
                f"--network-trace {trace.text}: this run is not on an emulated network (all its devices are on one "
                "host, or its links are real or loopback), so no link can be made to change; leave the option out, or "
                "train on an emulated cluster of several sites without --no-network and --listen"
            )
        self._trace, self._testbed, self._plan, self._profile = trace, testbed, plan, profile
        self._speeds: dict[str, SpeedTrace] = {}
        self._run_s = 0.0
        self._begun_s: float | None = None

    def prepare(self, steps: int, folder: Path) -> None:
        """Work out how links change over so many steps, and leave it in the run's folder.

        Raises:
            ConfigError: the trace does not fit the cluster or the run.
        """
        if self._trace is None:
            return
        self._run_s = calm_run_s(self._plan, self._profile, steps)
        self._speeds = self._trace.on(self._plan.cluster, self._run_s)
        write_changes(Changes(link_speed=self._speeds), folder / TRACE_NAME)

    def begin(self, begun_s: float) -> None:
        """Let the network follow the trace; it began with the first step, on this machine's monotonic clock."""
        if self._trace is not None and self._testbed is not None:
            self._begun_s = begun_s
            self._testbed.follow(self._speeds, start_s=begun_s)

    def end(self) -> None:
        """Give the links their normal speed again."""
        if self._begun_s is not None and self._testbed is not None:
            self._testbed.follow({})

    def rates_at(self, now_s: float) -> dict[str, float]:
        """Return the present bytes per second of each link that changes."""
        since_s = now_s - (now_s if self._begun_s is None else self._begun_s)
        normal = network_links(self._plan.cluster)
        return {name: normal[name] * speed.speed_at(since_s) for name, speed in self._speeds.items()}

    def figures(self, outcomes: Sequence[StepOutcome], folder: Path) -> NetworkTraceFigures | None:
        """Return what there was, with the times at which steps ended; None without a trace."""
        if self._trace is None:
            return None
        begun_s = 0.0 if self._begun_s is None else self._begun_s
        normal = network_links(self._plan.cluster)
        ends_s = tuple(outcome.closed_s - begun_s for outcome in outcomes if outcome.loss is not None)
        predicted = simulate_traced(self._plan, self._profile, min(len(ends_s), _MAX_PREDICTED_STEPS), self._speeds)
        rates = {}
        for name, speed in self._speeds.items():
            changes = tuple((at_s, part * normal[name]) for at_s, part in speed.changes)
            rates[name] = changes if changes[0][0] <= 0 else ((0.0, normal[name]), *changes)
        return NetworkTraceFigures(
            trace=self._trace.text,
            file=str(folder / TRACE_NAME),
            run_s=self._run_s,
            bytes_per_s=rates,
            step_ends_s=ends_s,
            predicted_step_ends_s=predicted.step_ends_s,
        )
