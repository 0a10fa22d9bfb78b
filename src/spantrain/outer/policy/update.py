"""An update over all shards: norms, verdicts, weighted mean, clipping, a new version; on every shard or on none.

Di-PS, 4.1. Kept: shards tell norms, the master says who is left out, the mean is weighted by tokens and clipped by its
norm over all shards. Decided here: the mean's norm is found in a second round of answers; every shard stages the new
version beside the present one, and only when all have is it committed. Pushes are added in order of their clusters'
names, and sums of squares come by layer and are added exactly: neither arrival nor the cut into shards changes a bit.

A push weighs as many tokens as were trained on for it, as there. Decided here, since a whole step for each window
multiplies the outer rate by the windows of a round, and training may then diverge:

- A window is a part of a step: the weight of its pushes over the tokens of one push of every cluster. A shard steps
  accordingly, so that the parts of a round come to what one step of all would (see `OuterRule`).
- A cluster's next push is taken to be as large as its last; that of one that never pushed as the mean of the others.
  Who does not train (`liveness`) and whose last push was left out (`guard`) is taken to be away.
- A cluster that has gone still counts for pushes that began no later than its own last: they are what is left of the
  round that it was in. Else the last one of all to end would go a whole step, momentum and all, with a few tokens.
- Asked for by name: a push weighs less, the more versions were made since the one that it began from. What it loses is
  missing from the part too, or a push alone in its window would lose nothing.
- Tokens are what clusters say. One counts for `_MAX_TIMES` as many a second as the next fastest at most, whatever it
  says and however often it pushes.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from spantrain.core.outer.commands import Combine, Commit, Measure, OuterCommand, PushWeight, StageVersion
from spantrain.core.outer.events import Committed, MeanCombined, NormsMeasured, Staged, Ticket
from spantrain.core.outer.layers import ShardLayout
from spantrain.core.records import Record
from spantrain.errors import ProtocolError
from spantrain.outer.policy.guard import GuardState, PushVerdict, judge
from spantrain.outer.policy.pushes import Push
from spantrain.outer.policy.settings import OuterSettings

_MAX_TIMES = 10.0
_PUSHES = 4
"""Of each cluster, whose largest tokens a second count."""


class Weighing(Record):
    """Of one window."""

    weights: Mapping[str, float]
    """By cluster; only what they are to each other matters."""
    tokens: Mapping[str, float]
    """Of its pushes, by cluster."""
    others: Mapping[str, float]
    """Tokens of the last pushes of clusters that have none in it."""
    unknown: int = 0
    """Clusters of which nothing is known."""
    whole: bool = False
    """Whether it is a step of all in any case."""

    def part(self, clusters: Collection[str]) -> float:
        """Return what part of a step the pushes of these are: over 0, at most 1. The rest of the window is as away."""
        if self.whole:
            return 1.0
        known = [*self.others.values(), *(self.tokens[name] for name in clusters)]
        expected = sum(known) * (1 + self.unknown / len(known))
        return min(1.0, sum(self.weights[name] for name in clusters) / expected)


class TokenRates:
    """The tokens a second that clusters say, and what of it counts.

    >>> rates = TokenRates()
    >>> rates.counted({"a": 600, "b": 10**12}, {"a": 60.0, "b": 2.0}, {"a": 500.0, "b": 0.0})
    ({'a': 600.0, 'b': 200.0}, {'a': 500.0, 'b': 0.0})
    """

    def __init__(self) -> None:
        self._told: dict[str, deque[float]] = {}

    def counted(
        self, tokens: Mapping[str, int], spans_s: Mapping[str, float], last_tokens: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return what counts of the tokens of pushes, and of those of each cluster's last push.

        `spans_s`: the seconds that each push took; 0 where that is not known, which is as it says.
        """
        here = {*tokens, *last_tokens}
        self._told = {name: told for name, told in self._told.items() if name in here}
        for name, span_s in spans_s.items():
            if span_s > 0:
                self._told.setdefault(name, deque(maxlen=_PUSHES)).append(tokens[name] / span_s)
        rates = {name: max(told) for name, told in self._told.items()}
        most = _MAX_TIMES * sorted(rates.values())[-2] if len(rates) > 1 else math.inf
        fair = {name: min(1.0, most / rate) if rate else 1.0 for name, rate in rates.items()}
        counted = {
            name: min(float(count), most * spans_s[name]) if spans_s[name] > 0 else float(count)
            for name, count in tokens.items()
        }
        return counted, {name: count * fair.get(name, 1.0) for name, count in last_tokens.items()}


def weigh(
    pushes: Collection[Push], *, version: int, tokens: Mapping[str, float], last_tokens: Mapping[str, float],
    settings: OuterSettings,
) -> Weighing:  # fmt: skip
    """Weigh the pushes of a window.

    `version` is the newest; `tokens`: what counts of each push's; `last_tokens` has, for each cluster that trains, the
    tokens of its last push, or 0, and those of clusters that have gone in this round.

    >>> from spantrain.core.outer.events import Ticket
    >>> push = Push(ticket=Ticket(1, 1), cluster="a", base_version=2, tokens=600, progress=(), parameters=False)
    >>> last = {"a": 500.0, "b": 200.0, "c": 0.0}
    >>> weigh([push], version=5, tokens={"a": 600.0}, last_tokens=last, settings=OuterSettings()).part("a")
    0.5
    """
    others = {name: count for name, count in last_tokens.items() if name not in tokens}
    ages = (math.pow(1 + max(0, version - one.base_version), settings.staleness_power) for one in pushes)
    return Weighing(
        weights={one.cluster: tokens[one.cluster] / age for one, age in zip(pushes, ages, strict=True)},
        tokens=tokens,
        others={name: count for name, count in others.items() if count},
        unknown=sum(not count for count in others.values()),
        whole=not settings.part_steps or any(push.parameters for push in pushes),
    )


Answer = NormsMeasured | MeanCombined | Staged | Committed


class Update:
    """One update; asks all shards for one thing after the other, hears their answers, and tells what it came to."""

    def __init__(
        self, ticket: Ticket, pushes: Sequence[Push], weighing: Weighing, layout: ShardLayout, settings: OuterSettings,
        guard: GuardState, *, trains: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Begin with nothing told; `trains`: clusters that push from time to time, besides those of the pushes."""
        assert pushes
        self.ticket = ticket
        self.pushes = tuple(sorted(pushes, key=lambda push: push.cluster))
        self.tickets = (ticket, *(push.ticket for push in self.pushes))
        """Its own, and those of its pushes."""
        self.seeds = self.pushes[0].parameters
        """Whether it brings the first parameters."""
        self.awaits: type[Answer] = NormsMeasured
        """What shards are to answer now."""
        self.guard = guard
        """What is known of norms, after the verdicts."""
        self.verdicts: tuple[PushVerdict, ...] = ()
        self.staleness: Mapping[str, int] = {}
        """By cluster: versions that were made since the one that it started from; once it is decided."""
        self.norm, self.scale = 0.0, 1.0
        """Of the mean, before it was clipped, 0 where there was none; and what it was multiplied by, to clip it."""
        self.part = 1.0
        """Of a step of all clusters that its pushes are."""
        self.version: int | None = None
        """None where all pushes were left out."""
        self._weighing, self._layout, self._settings, self._trains = weighing, layout, settings, trains
        self._answers: dict[str, Answer] = {}

    @property
    def accepted(self) -> tuple[Push, ...]:
        """Pushes that were not left out."""
        names = {verdict.cluster for verdict in self.verdicts if verdict.accepted}
        return tuple(push for push in self.pushes if push.cluster in names)

    @property
    def missing(self) -> tuple[str, ...]:
        """Shards that have not answered."""
        return tuple(shard for shard in self._layout.shards if shard not in self._answers)

    def begin(self) -> list[OuterCommand]:
        """Ask for norms."""
        tickets = tuple(push.ticket for push in self.pushes)
        names = ", ".join(push.cluster for push in self.pushes)
        return self._ask(NormsMeasured, partial(Measure, pushes=tickets, reason=f"the window with {names} has ended"))

    def _ask(self, awaits: type[Answer], order: Callable[..., OuterCommand]) -> list[OuterCommand]:
        self.awaits, self._answers = awaits, {}
        return [order(shard=shard, update=self.ticket) for shard in self._layout.shards]

    def heard(self, answer: Answer) -> bool:
        """Take in a shard's answer; return whether it is to what was asked now, and was the first of its shard.

        Raises:
            ProtocolError: it does not tell what was asked.
        """
        ours = answer.version == self.version if isinstance(answer, Committed) else answer.update == self.ticket
        if type(answer) is not self.awaits or not ours or answer.shard in self._answers:
            return False
        self._check(answer)
        self._answers[answer.shard] = answer
        return True

    def _check(self, answer: Answer) -> None:
        match answer:
            case NormsMeasured():
                lists = list(answer.squares.values())
                if answer.squares.keys() != {push.ticket for push in self.pushes}:
                    raise ProtocolError(f"{answer.shard}: norms of other pushes than those asked for; start it again")
            case MeanCombined():
                lists = [answer.squares]
            case _:
                return
        layers = len(self._layout.layers_of(answer.shard))
        if any(len(squares) != layers for squares in lists):
            raise ProtocolError(f"{answer.shard}: must tell sums of {layers} layers; start it again with this layout")
        if any(square < 0 for squares in lists for square in squares):
            raise ProtocolError(f"{answer.shard}: a sum of squares is negative; its memory or its code is broken")

    def judge(self) -> None:
        """Find by the norms who takes part."""
        answers = [answer for answer in self._answers.values() if isinstance(answer, NormsMeasured)]
        norms = {push.cluster: _norm(s for a in answers for s in a.squares[push.ticket]) for push in self.pushes}
        if self.seeds:
            for name, norm in norms.items():
                finite = math.isfinite(norm)
                reason = "first parameters" if finite else "first parameters are not finite"
                self.verdicts += (PushVerdict(cluster=name, norm=norm, accepted=finite, reason=reason),)
        else:
            tokens, settings = {push.cluster: push.tokens for push in self.pushes}, self._settings.guard
            self.guard, self.verdicts = judge(self.guard, norms, settings, trains=self._trains, tokens=tokens)
        if self.accepted:
            self.part = self._weighing.part([push.cluster for push in self.accepted])

    def clip(self) -> None:
        """Find the mean's norm, and what to multiply it by."""
        self.norm = _norm(s for a in self._answers.values() if isinstance(a, MeanCombined) for s in a.squares)
        limit = self._settings.clip_norm
        self.scale = 1.0 if limit is None or self.norm <= limit else limit / self.norm

    def combine(self) -> list[OuterCommand]:
        """Ask for the mean over those that were accepted."""
        heavy = self._weighing.weights
        whole = sum(heavy[push.cluster] for push in self.accepted)
        weights = tuple(
            PushWeight(push=push.ticket, part=heavy[push.cluster] / whole, base_version=push.base_version)
            for push in self.accepted
        )
        compensation = self._settings.compensation
        reason = "; ".join(f"{verdict.cluster}: {verdict.reason}" for verdict in self.verdicts)
        return self._ask(MeanCombined, partial(Combine, weights=weights, compensation=compensation, reason=reason))

    def stage(self, version: int) -> list[OuterCommand]:
        """Ask for the new version."""
        self.version = version
        parameters = self.pushes[0].ticket if self.seeds else None
        told = f"norm of the mean {self.norm:.4g}, times {self.scale:.3g}, {self.part:.3g} of a step"
        reason = "the first parameters" if parameters else told
        order = partial(StageVersion, version=version, scale=self.scale, parameters=parameters, part=self.part)
        return self._ask(Staged, partial(order, reason=reason))

    def commit(self, keep: Collection[int], bases: Collection[int]) -> list[OuterCommand]:
        """Ask for it to be served; see `Commit`."""
        assert self.version is not None
        order = partial(Commit, version=self.version, keep=tuple(sorted(keep)), bases=tuple(sorted(bases)))
        return self._ask(Committed, partial(order, reason="staged on all shards"))


def _norm(squares: Iterable[float]) -> float:
    """Return the root of a sum, added exactly; not finite where a part is not."""
    parts = tuple(squares)
    try:
        return math.sqrt(math.fsum(parts)) if all(map(math.isfinite, parts)) else math.nan
    except OverflowError:
        return math.inf
