"""SpanTrain's three strategies (3.4), as a baseline: micro-batches become smaller, and never anything else.

Kept: which micro-batches become smaller when, per stage, by thresholds. The paper leaves open by how much (here: by
half, as in its figure 8b), what is a poor network (here: under 80 % of the best rate seen) and a significant delay
(here: `local.SLOWER` times the best one seen). Not kept: its smaller backwards behind the last forward act on
micro-batches that have run forward already; a graph goes back as it went forward, so those that go back last are made
smaller before. All forwards end in every step, so this happens with a calm network too; the paper's own cost on a calm
network (3 to 9 %) comes from smaller micro-batches as well.
"""

from collections.abc import Mapping
from dataclasses import replace

from spantrain.core.messages import Event, Recut, StepStarted
from spantrain.core.plan import Plan, Stage
from spantrain.core.spans import Span
from spantrain.policy.adapter.boundary import Proposal
from spantrain.policy.adapter.local import SLOWER, LocalAdapter, LocalState, Pace
from spantrain.policy.adapter.state import Pair, Reports, measured_rates
from spantrain.policy.machine import DispatchPolicy
from spantrain.policy.monitor import LinkExpectation, RateSample, SentMessage
from spantrain.policy.recut import halved

__all__ = ["PaperBoundary", "PaperLocal"]

_POOR = 0.8
"""Of the best rate seen of a link."""


class PaperLocal(LocalAdapter):
    """The second strategy: after a delayed send, what has not begun is halved; once in a step."""

    def __init__(self, expected: Mapping[str, LinkExpectation] | None = None, *, forward_to: frozenset[str]) -> None:
        """Watch what goes to these peers, the next stage's."""
        super().__init__(expected)
        self._forward_to = forward_to
        self._paces: dict[str, Pace] = {}
        self._delayed = ""
        self._done = False

    @property
    def state(self) -> LocalState:
        """What is known now, between two steps."""
        sending = {peer: pace.state for peer, pace in self._paces.items()}
        return LocalState(monitor=self.monitor.state, sending=sending)

    def take_up(self, state: LocalState) -> None:
        """Go on from what was known: after a change of plan, or of a saved run."""
        super().take_up(state)
        self._paces = {peer: Pace(kept) for peer, kept in state.sending.items()}

    def heard(self, now_s: float, event: Event) -> None:
        """Begin anew with every step."""
        super().heard(now_s, event)
        if isinstance(event, StepStarted):
            self._delayed, self._done = "", False

    def sent(self, message: SentMessage, samples: int) -> RateSample | None:
        """Note whether sending takes much longer than it did."""
        rate = super().sent(message, samples)
        if samples and message.peer in self._forward_to:
            pace = self._paces.setdefault(message.peer, Pace())
            pace.note(message.acknowledged_s - message.started_s, samples)
            if pace.slowness > SLOWER:
                self._delayed = f"a send to {message.peer} took {pace.slowness:.1f} times as long as at best"
        return rate

    def recut(self, now_s: float, policy: DispatchPolicy) -> Recut | None:  # noqa: ARG002
        """Return halves of what has not begun, behind a delayed send."""
        if not self._delayed or self._done:
            return None
        unbegun = policy.unbegun
        finer = halved(unbegun)
        if finer == unbegun:
            return None
        self._done = True
        return Recut(finer, self._delayed)


class PaperBoundary:
    """The first and the third strategy, which are known before a step: small to fill when the network is poor, small
    at the end always.
    """

    def __init__(self, base: Plan) -> None:
        self._base = base
        self._best: dict[Pair, float] = {}

    def advise(self, step: int, plan: Plan, reports: Reports, step_s: float) -> Proposal | None:  # noqa: ARG002
        """Return the plan with other micro-batches, if those of the last step are not the ones that the rules want."""
        rates = measured_rates(reports)
        for pair, rate in rates.items():
            self._best[pair] = max(rate, self._best.get(pair, rate))
        poor = sorted(pair for pair, rate in rates.items() if rate < _POOR * self._best[pair])
        wanted = self._resized(fill=bool(poor))
        if [stage.micro_batches for stage in plan.stages] == [stage.micro_batches for stage in wanted.stages]:
            return None
        why = f"poor link {poor[0][0]}->{poor[0][1]}: small ones fill the pipeline; " if poor else ""
        return Proposal(plan=wanted, reason=f"{why}small ones at the end of the step")

    def _resized(self, *, fill: bool) -> Plan:
        depth = len(self._base.stages)
        stages = tuple(_resized(stage, depth, fill=fill) for stage in self._base.stages)
        return replace(self._base, stages=stages, hints=None)


def _resized(stage: Stage, depth: int, *, fill: bool) -> Stage:
    """Return the stage with the last micro-batches halved, and the first ones to fill; a pipeline's depth each."""
    spans = stage.micro_batches
    first = depth if fill else 0
    last = max(first, len(spans) - depth)
    parts: tuple[Span, ...] = (*halved(spans[:first]), *spans[first:last], *halved(spans[last:]))
    return replace(stage, micro_batches=parts)
