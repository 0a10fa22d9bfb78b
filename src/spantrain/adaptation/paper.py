"""SpanTrain's three strategies (3.4), as a baseline: micro-batches become smaller, and never anything else.

Kept: which micro-batches become smaller when, per stage, by thresholds; the pace of the last 20 messages in each
direction (4.6); pieces that are put together again when links are fast again. The paper leaves open by how much (here:
by half, as in its figure 8b), what is a poor network (here: under 80 % of what a simulation of the plan that runs
expects, and poor up to 90 %) and a significant delay (here: 1.5 times the slowest pace of the calmest step). Not kept:
its smaller backwards behind the last forward act on micro-batches that have run forward already; a graph goes back as
it went forward, so those that go back last are made smaller before. All forwards end in every step, so this happens
with a calm network too; the paper's own cost on a calm network (3 to 9 %) comes from smaller micro-batches as well.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from spantrain.adaptation import network_state
from spantrain.adaptation.boundary import PlanReplacement
from spantrain.adaptation.local import CuttingLocal
from spantrain.core.action import Direction
from spantrain.core.plan import Plan, Stage
from spantrain.core.span import Span
from spantrain.schedule.dispatch.recut import halved

_POOR, _GOOD_AGAIN = 0.8, 0.9
"""Parts of what is expected of a link."""
_JUMPED = 1.3
"""Times the least that a poor link gave: it is good again, too. What was cut in mid-step is not what is expected of the
plan, and links that share a line then give something else."""
_DELAYED = 1.5
"""Times the calm pace."""
_MATTERS = 0.1
"""Links that are busy for less than this part of a step do not make the network poor."""


class PaperLocal(CuttingLocal):
    """The second strategy: while sends to a neighbour are delayed, in either direction, what has not begun is halved,
    and what goes there goes in halves.
    """

    _messages = 20

    _delayed: Mapping[Direction, float] = MappingProxyType({})
    """How many times the calm pace."""

    def piece_samples(self, peer: str, samples: int) -> int:
        """Return half of them where sends are delayed."""
        return -(-samples // 2) if self._direction(peer) in self._delayed else samples

    def _look(self) -> None:
        was = bool(self._delayed)
        slowness = {direction: pace.slowness for direction, pace in self._sending.items()}
        self._delayed = {direction: times for direction, times in slowness.items() if times >= _DELAYED}
        if was != bool(self._delayed):
            self._is_looked_at = False

    @property
    def _is_slow(self) -> bool:
        return bool(self._delayed)

    def _parts(self, samples: int) -> int:
        return min(samples, 2) if self._delayed else 1

    @property
    def _reason(self) -> str:
        if not self._delayed:
            return "sends are in time again"
        direction, times = max(self._delayed.items(), key=lambda entry: entry[1])
        return f"sends {direction.value} take {times:.1f} times as long as on calm links"


class PaperBoundary:
    """The first and the third strategy, which are known before a step: small to fill when the network is poor, small
    at the end always.
    """

    def __init__(self, base: Plan, expects: network_state.Expects) -> None:
        """Begin with the plan that was made for calm links."""
        self._base = base
        self._watch = network_state.LinkWatch(expects)
        self._poor: dict[network_state.Pair, float] = {}
        """Links that made the network poor, each with the least part of what is expected that it gave since."""

    def advise(self, step: int, plan: Plan, reports: network_state.Reports, step_s: float) -> PlanReplacement | None:  # noqa: ARG002
        """Return the plan with other micro-batches, if those of the last step are not the ones that the rules want."""
        self._poor = self._found_poor(plan, reports, step_s)
        stages = tuple(_resized(stage, len(self._base.stages), fill=bool(self._poor)) for stage in self._base.stages)
        wanted = replace(self._base, stages=stages, hints=None)
        if [stage.micro_batches for stage in plan.stages] == [stage.micro_batches for stage in wanted.stages]:
            return None
        pair = min(self._poor, default=None)
        why = f"poor link {pair[0]}->{pair[1]}: small ones fill the pipeline; " if pair else ""
        return PlanReplacement(plan=wanted, reason=f"{why}small ones at the end of the step")

    def _found_poor(self, plan: Plan, reports: network_state.Reports, step_s: float) -> dict[network_state.Pair, float]:
        """Return the links that make the network poor; once it is, until all of them are good again."""
        rates = self._watch.learn(
            plan, network_state.measured_rates(reports, least=network_state.SURE), network_state.LinkState()
        )
        given = self._watch.given(plan, rates, network_state.LinkState())
        busy = network_state.busy_links(reports, _MATTERS * step_s)
        poor = {pair: part for pair, part in given.items() if pair in busy and part < _POOR}
        if not self._poor:
            return poor
        good = (given.get(pair, 0.0) >= min(_GOOD_AGAIN, _JUMPED * least) for pair, least in self._poor.items())
        if all(good):
            return {}
        return {pair: min(given.get(pair, math.inf), part) for pair, part in (poor | self._poor).items()}


def _resized(stage: Stage, depth: int, *, fill: bool) -> Stage:
    """Return the stage with the last micro-batches halved, and the first ones to fill; a pipeline's depth each."""
    spans = stage.micro_batches
    first = depth if fill else 0
    last = max(first, len(spans) - depth)
    parts: tuple[Span, ...] = (*halved(spans[:first]), *spans[first:last], *halved(spans[last:]))
    return replace(stage, micro_batches=parts)
