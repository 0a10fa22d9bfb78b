"""Other ways to train over clusters, in the same virtual world: what the outer optimizer is compared with.

After Di-PS, 5.1 (baselines), 2.2 and 3.1:

- `dp`: every step of all clusters ends with a sum of gradients over the lines, which all wait for.
- `diloco`: all take H steps, wait for the slowest, exchange parameters, and go on. (DiLoCo.)
- `async-diloco`: whoever has taken H steps averages with what the others have published last, and takes its own outer
  step; nobody waits for anybody, but whoever exchanges stands still until it has. There is no server, so all take part
  in each exchange.

Kept: who waits for what, and that an exchange without a server is an all-reduce, as slow as the slowest line. Decided
here: it is a ring, which moves the fewest bytes: each of N sends 2 (N - 1) / N of the model to the next. Exchanges that
are under way at once share lines. A sum begins when all have their part; nothing is computed beside it. All begin with
the same parameters, and none of them is ever killed.
"""

import random
from collections.abc import Callable
from typing import Protocol

from spantrain.sim.transfers import VirtualClock
from spantrain_studies.outer.bodies import Bodies
from spantrain_studies.outer.case import ClusterFigures, OuterCase, OuterResult, SimulatedCluster
from spantrain_studies.outer.world import LineNetwork, simulate_outer

METHODS = ("dp", "diloco", "async-diloco", "outer")


class RoundBodies(Protocol):
    """The arithmetic of clusters without a server."""

    def step(self, cluster: str) -> None:
        """Take an inner step; under `dp`, find its gradients."""

    def publish(self, cluster: str) -> None:
        """Give others what was learned."""

    def merge(self, cluster: str) -> None:
        """Go on from what all have published last."""


class MethodBodies(Bodies, RoundBodies, Protocol):
    """The arithmetic of all methods."""


class _NoNumbers:
    def step(self, cluster: str) -> None:
        """Compute nothing."""

    def publish(self, cluster: str) -> None:
        """Give nothing."""

    def merge(self, cluster: str) -> None:
        """Change nothing."""


def simulate_method(method: str, case: OuterCase, bodies: MethodBodies | None = None) -> OuterResult:
    """Run a case by one of `METHODS`.

    Raises:
        ValueError: there is no such method, or it does not know of faults.

    >>> from spantrain_studies.outer.case import MemberLine, SimulatedShard, equal_layers
    >>> line = MemberLine(bandwidth_bytes_per_s=1e6)
    >>> speeds = {"a": 1.0, "b": 2.0}
    >>> case = OuterCase(
    ...     clusters=tuple(SimulatedCluster(name=name, step_s=step_s, line=line) for name, step_s in speeds.items()),
    ...     shards=(SimulatedShard(name="s0", line=line),), layers=equal_layers(4, 1_000_000),
    ...     inner_steps=10, steps=300)
    >>> {method: round(simulate_method(method, case).throughput_vs_ideal, 2) for method in METHODS}
    {'dp': 0.45, 'diloco': 0.64, 'async-diloco': 0.93, 'outer': 1.0}
    """
    if method not in METHODS:
        raise ValueError(f"no method {method!r}; give one of {', '.join(METHODS)}")
    if method == "outer":
        return simulate_outer(case, bodies)
    if case.faults:
        raise ValueError(f"{method} is simulated without faults only; leave them out, or simulate outer")
    return _MethodSimulation(method, case, bodies or _NoNumbers()).run()


class _MethodCluster:
    """What one of them has done."""

    def __init__(self, spec: SimulatedCluster) -> None:
        self.spec = spec
        self.chance = random.Random(spec.name)
        self.steps = self.rounds = self.versions_seen = self.versions_behind = 0
        self.train_s = 0.0

    def step_s(self) -> float:
        seconds = self.spec.step_s * (1 + self.spec.gap * self.chance.random())
        self.train_s += seconds
        return seconds


class _MethodSimulation:
    def __init__(self, method: str, case: OuterCase, bodies: RoundBodies) -> None:
        self._method, self._case, self._bodies = method, case, bodies
        self._clock = VirtualClock()
        self._lines = LineNetwork(self._clock, case)
        self._clusters = {one.name: _MethodCluster(one) for one in case.clusters}
        self._round_steps = 1 if method == "dp" else case.inner_steps
        self._taken = self._versions = 0
        self._rings = 0
        self._ring_since_s = self._comm_s = 0.0
        self._here: list[str] = []
        self._last_s = 0.0

    def run(self) -> OuterResult:
        for name, cluster in self._clusters.items():
            self._clock.at(cluster.spec.begins_s, self._begin_round, name)
        self._clock.run()
        return self._result()

    def _may_step(self) -> bool:
        case = self._case
        if case.steps is None:
            return self._clock.now_s < (case.seconds or 0.0)
        self._taken += 1
        return self._taken <= case.steps

    def _begin_round(self, name: str) -> None:
        self._step(name, self._round_steps)

    def _step(self, name: str, left: int) -> None:
        if left == 0 or not self._may_step():
            self._end_round(name)
            return
        self._clock.at(self._clock.now_s + self._clusters[name].step_s(), self._end_step, name, left)

    def _end_step(self, name: str, left: int) -> None:
        self._bodies.step(name)
        self._clusters[name].steps += 1
        self._last_s = self._clock.now_s
        self._step(name, left - 1)

    def _end_round(self, name: str) -> None:
        """Exchange: by oneself, or when all are here."""
        if self._method == "async-diloco":
            self._bodies.publish(name)
            self._ring(lambda: self._merged([name]))
            return
        self._here.append(name)
        if len(self._here) == len(self._clusters):
            self._here.clear()
            names = list(self._clusters)
            for one in names:
                self._bodies.publish(one)
            self._ring(lambda: self._merged(names))

    def _merged(self, names: list[str]) -> None:
        self._versions += 1
        copy_s = 0.0 if self._method == "dp" else 2 * self._case.copy_s
        for name in names:
            cluster = self._clusters[name]
            self._bodies.merge(name)
            cluster.rounds += 1
            cluster.versions_behind += self._versions - 1 - cluster.versions_seen
            cluster.versions_seen = self._versions
            if self._more:
                self._clock.at(self._clock.now_s + copy_s, self._begin_round, name)

    @property
    def _more(self) -> bool:
        case = self._case
        return self._taken < case.steps if case.steps is not None else self._clock.now_s < (case.seconds or 0.0)

    def _ring(self, done: Callable[[], None]) -> None:
        """Reduce over all clusters; all of them are in it."""
        names = list(self._clusters)
        count = len(names)
        if count == 1:
            done()
            return
        self._note_rings(+1)
        left = count
        hops_s = (2 * (count - 1) - 1) * max(2 * self._case.lines[name].latency_s for name in names)

        def arrived(_start_s: float, _sent_s: float) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._clock.at(self._clock.now_s + hops_s, ended)

        def ended() -> None:
            self._note_rings(-1)
            done()

        size_bytes = 2 * (count - 1) * self._case.model_bytes // count
        for k, name in enumerate(names):
            self._lines.send(name, names[(k + 1) % count], size_bytes, arrived)

    def _note_rings(self, more: int) -> None:
        if self._rings == 0:
            self._ring_since_s = self._clock.now_s
        self._rings += more
        if self._rings == 0:
            self._comm_s += self._clock.now_s - self._ring_since_s

    def _result(self) -> OuterResult:
        case = self._case
        begin_s = min(one.begins_s for one in case.clusters)
        return OuterResult(
            method=self._method,
            clusters={name: self._figures(one, self._last_s - begin_s) for name, one in self._clusters.items()},
            versions=self._versions,
            rejected_updates=0,
            span_s=self._last_s - begin_s,
            end_s=self._clock.now_s,
            ideal_tokens_per_s=sum(case.tokens_per_step / one.mean_step_s for one in case.clusters),
        )

    def _figures(self, one: _MethodCluster, span_s: float) -> ClusterFigures:
        tokens = one.steps * self._case.tokens_per_step
        return ClusterFigures(
            tokens=tokens,
            tokens_counted=tokens,
            tokens_lost=0,
            inner_steps=one.steps,
            outer_rounds=one.rounds,
            mean_staleness=one.versions_behind / one.rounds if one.rounds else 0.0,
            comm_s=self._comm_s,
            train_s=one.train_s,
            stood_still_s=max(0.0, span_s - one.train_s),
        )
