"""An update over all shards: norms, verdicts, weighted mean, clipping, a new version; on every shard or on none.

Di-PS, 4.1. Kept: shards tell norms, the master says who is left out, the mean is weighted by tokens and clipped by its
norm over all shards. Decided here: the mean's norm is found in a second round of answers; every shard stages the new
version beside the present one, and only when all have is it committed. Pushes are added in order of their clusters'
names, and sums of squares come by layer and are added exactly: neither arrival nor the cut into shards changes a bit.
What pushes weigh, and what part of a step they are together, is said by `weighing`.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from spantrain.core.outer.commands import Combine, Measure, OuterCommand, PushWeight, StageVersion
from spantrain.core.outer.events import Committed, MeanCombined, NormsMeasured, Staged, Ticket
from spantrain.core.outer.layers import ShardLayout
from spantrain.errors import ProtocolError
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.policy.transfers.exchanges import Push
from spantrain.outer.policy.updates.guard import GuardState, PushVerdict, judge
from spantrain.outer.policy.updates.weighing import Weighing

Answer = NormsMeasured | MeanCombined | Staged | Committed


class UpdatePhase(Enum):
    """How far an update is."""

    MEASURING = "measuring"
    JUDGED = "judged"
    COMBINING = "combining"
    STAGING = "staging"
    STAGED = "staged"
    COMMITTING = "committing"
    COMMITTED = "committed"
    EMPTY = "empty"
    """All its pushes were left out: there is no new version."""


@dataclass(frozen=True, kw_only=True)
class UpdateOutcome:
    """What an update came to."""

    update: Ticket
    version: int | None
    """None where all pushes were left out."""
    verdicts: tuple[PushVerdict, ...]
    staleness: Mapping[str, int]
    """By cluster: versions that were made since the one that it started from."""
    norm: float
    """Of the mean, before it was clipped; 0 where there was none."""
    scale: float
    """What it was multiplied by, to clip it."""
    part: float
    """Of a step of all clusters that its pushes are."""


class Update:
    """One update; hears the shards' answers of its present phase."""

    def __init__(
        self, ticket: Ticket, pushes: Sequence[Push], weighing: Weighing, layout: ShardLayout, settings: OuterSettings,
        guard: GuardState, *, trains: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Begin with nothing told; `trains`: clusters that push from time to time, besides those of the pushes."""
        assert pushes
        self.ticket = ticket
        self.pushes = tuple(sorted(pushes, key=lambda push: push.cluster))
        self.phase = UpdatePhase.MEASURING
        self.guard = guard
        """What is known of norms, after the verdicts."""
        self.verdicts: tuple[PushVerdict, ...] = ()
        self.norm = 0.0
        self.scale = 1.0
        self.part = 1.0
        self.version: int | None = None
        self._weighing = weighing
        self._layout = layout
        self._settings = settings
        self._trains = trains
        self._answers: dict[str, Answer] = {}

    @property
    def _seeds(self) -> bool:
        return self.pushes[0].parameters

    @property
    def accepted(self) -> tuple[Push, ...]:
        """Pushes that were not left out."""
        names = {verdict.cluster for verdict in self.verdicts if verdict.accepted}
        return tuple(push for push in self.pushes if push.cluster in names)

    @property
    def missing(self) -> tuple[str, ...]:
        """Shards that have not answered."""
        return tuple(shard for shard in self._layout.shards if shard not in self._answers)

    def outcome(self, version_before: int) -> UpdateOutcome:
        """Return what it came to."""
        return UpdateOutcome(
            update=self.ticket,
            version=self.version if self.phase is not UpdatePhase.EMPTY else None,
            verdicts=self.verdicts,
            staleness={push.cluster: max(0, version_before - push.base_version) for push in self.pushes},
            norm=self.norm,
            scale=self.scale,
            part=self.part,
        )

    def begin(self) -> list[OuterCommand]:
        """Ask for norms."""
        tickets = tuple(push.ticket for push in self.pushes)
        names = ", ".join(push.cluster for push in self.pushes)
        return [
            Measure(shard=shard, update=self.ticket, pushes=tickets, reason=f"the window with {names} has ended")
            for shard in self._layout.shards
        ]

    def heard(self, answer: Answer) -> bool:
        """Take in a shard's answer; return whether it belongs to the present phase, and was the first of its shard.

        Raises:
            ProtocolError: it does not tell what was asked.
        """
        wanted = {
            UpdatePhase.MEASURING: NormsMeasured,
            UpdatePhase.COMBINING: MeanCombined,
            UpdatePhase.STAGING: Staged,
            UpdatePhase.COMMITTING: Committed,
        }.get(self.phase)
        ours = answer.version == self.version if isinstance(answer, Committed) else answer.update == self.ticket
        if wanted is None or not isinstance(answer, wanted) or not ours or answer.shard in self._answers:
            return False
        self._check(answer)
        self._answers[answer.shard] = answer
        if not self.missing:
            self._next()
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

    def _next(self) -> None:
        if self.phase is UpdatePhase.MEASURING:
            self._judge()
        elif self.phase is UpdatePhase.COMBINING:
            self.norm = _norm(s for a in self._answers.values() if isinstance(a, MeanCombined) for s in a.squares)
            limit = self._settings.clip_norm
            self.scale = 1.0 if limit is None or self.norm <= limit else limit / self.norm
            self.phase = UpdatePhase.JUDGED if math.isfinite(self.norm) else UpdatePhase.EMPTY
        else:
            self.phase = {UpdatePhase.STAGING: UpdatePhase.STAGED, UpdatePhase.COMMITTING: UpdatePhase.COMMITTED}[
                self.phase
            ]
        self._answers = {}

    def _judge(self) -> None:
        answers = [answer for answer in self._answers.values() if isinstance(answer, NormsMeasured)]
        norms = {push.cluster: _norm(s for a in answers for s in a.squares[push.ticket]) for push in self.pushes}
        if self._seeds:
            self.verdicts = tuple(_first(cluster, norm) for cluster, norm in norms.items())
        else:
            self.guard, self.verdicts = judge(self.guard, norms, self._settings.guard, trains=self._trains)
        if not self.accepted:
            self.phase = UpdatePhase.EMPTY
        else:
            self.part = self._weighing.part([push.cluster for push in self.accepted])
            self.phase = UpdatePhase.JUDGED if self._seeds else UpdatePhase.COMBINING

    def combine(self) -> list[OuterCommand]:
        """Ask for the mean over those that were accepted."""
        assert self.phase is UpdatePhase.COMBINING
        heavy = self._weighing.weights
        whole = sum(heavy[push.cluster] for push in self.accepted)
        weights = tuple(
            PushWeight(push=push.ticket, part=heavy[push.cluster] / whole, base_version=push.base_version)
            for push in self.accepted
        )
        compensation = self._settings.compensation
        reason = "; ".join(f"{verdict.cluster}: {verdict.reason}" for verdict in self.verdicts)
        return [
            Combine(shard=shard, update=self.ticket, weights=weights, compensation=compensation, reason=reason)
            for shard in self._layout.shards
        ]

    def stage(self, version: int) -> list[OuterCommand]:
        """Ask for the new version."""
        assert self.phase is UpdatePhase.JUDGED
        self.phase, self.version = UpdatePhase.STAGING, version
        parameters = self.pushes[0].ticket if self._seeds else None
        reason = f"norm of the mean {self.norm:.4g}, times {self.scale:.3g}, {self.part:.3g} of a step"
        if self._seeds:
            reason = "the first parameters"
        return [
            StageVersion(
                shard=shard,
                update=self.ticket,
                version=version,
                scale=self.scale,
                parameters=parameters,
                part=self.part,
                reason=reason,
            )
            for shard in self._layout.shards
        ]


def _norm(squares: Iterable[float]) -> float:
    """Return the root of a sum, added exactly; not finite where a part is not."""
    parts = tuple(squares)
    try:
        return math.sqrt(math.fsum(parts)) if all(map(math.isfinite, parts)) else math.nan
    except OverflowError:
        return math.inf


def _first(cluster: str, norm: float) -> PushVerdict:
    finite = math.isfinite(norm)
    reason = "first parameters" if finite else "first parameters are not finite"
    return PushVerdict(cluster=cluster, norm=norm, accepted=finite, reason=reason)
