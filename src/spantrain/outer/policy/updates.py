"""The window that gathers pushes, the update under way, and what is decided by it: versions, tokens, the guard."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from spantrain.core.outer.commands import EndRound, Forget, OuterCommand, Save, SkipRound
from spantrain.core.outer.events import Committed, MeanCombined, NormsMeasured, PushOutcome, Staged, Ticket
from spantrain.core.outer.layers import ShardLayout
from spantrain.outer.policy.liveness import Trainers
from spantrain.outer.policy.pushes import Push
from spantrain.outer.policy.settings import ClusterRecord, MasterState, OuterSettings
from spantrain.outer.policy.update import Answer, TokenRates, Update, weigh

_MAX_COUNTED = 2**62
"""Tokens; more than that is not told to anybody."""


class Updates:
    """From accepted pushes to decided versions; one update at a time."""

    def __init__(self, layout: ShardLayout, settings: OuterSettings, state: MasterState, trainers: Trainers) -> None:
        self.state = state
        """Without the chunks."""
        self._layout, self._settings, self._trainers = layout, settings, trainers
        self._rates = TokenRates()
        self._spans_s: dict[str, float] = {}
        """Of the pushes in the window: the time since the cluster's last one, or since it trains."""
        self.counted: list[Push] = []
        """Pushes of which all is decided, for whoever takes them from here."""
        self.last: Update | None = None
        """The last update that was decided."""
        self._window: dict[str, Push] = {}
        self._window_ends_s = 0.0
        self._enders: set[str] = set()
        """Clusters that have ended the round of the window that is to come, or is open."""
        self._told: set[str] = set()
        """Those that were told to push for it."""
        self._excused: set[str] = set()
        """Clusters that said they will not."""
        self._update: Update | None = None
        self._begun_s = 0.0

    @property
    def pending(self) -> tuple[Push, ...]:
        """Accepted pushes of which nothing is decided."""
        under_way = self._update.pushes if self._update and not self.committing else ()
        return (*self._window.values(), *under_way)

    @property
    def committing(self) -> bool:
        """Whether a version is decided that not all shards serve yet."""
        return self._update is not None and self._update.awaits is Committed

    @property
    def wake_s(self) -> float | None:
        """When the window ends, or the update has taken too long."""
        if self._update:
            return self._begun_s + self._settings.transfer_limit_s
        return self._window_ends_s if self._window else None

    def fate(self, cluster: str, push: Ticket) -> PushOutcome:
        """Return what became of a push."""
        if any(one.ticket == push and one.cluster == cluster for one in self.pending):
            return PushOutcome.PENDING
        return PushOutcome.COUNTED if self.state.seeded and self.last_push(cluster) == push else PushOutcome.SKIPPED

    def last_push(self, cluster: str) -> Ticket | None:
        """Return a cluster's last push that was decided on."""
        text = self._record(cluster).last_push
        return Ticket.parse(text) if text else None

    def left_out(self, cluster: str) -> bool:
        """Return whether the guard left that one out."""
        return self._record(cluster).last_left_out

    def _record(self, cluster: str) -> ClusterRecord:
        return self.state.clusters.get(cluster, ClusterRecord())

    def accept(self, now_s: float, push: Push) -> str:
        """Put a push into the window; return what it waits for."""
        assert push.cluster not in self._window
        if not self._window:
            self._window_ends_s = now_s + self._settings.grace_s
        self._window[push.cluster] = push
        if not push.parameters:
            since_s = self._trainers.since_s(push.cluster)
            self._spans_s[push.cluster] = 0.0 if since_s is None else now_s - since_s
            self._trainers.pushed(now_s, push.cluster)
        return f"the window with {len(self._window)} of the clusters ends in {self._window_ends_s - now_s:.3g} s"

    def end_round(self, cluster: str, others: Collection[str]) -> list[OuterCommand]:
        """Have others push, since a cluster that took all steps of a round does; each once for each window.

        Who has said meanwhile that it has too little is asked again, by whoever else ends a round. One whose last push
        was left out ends nobody's.
        """
        if cluster in self._enders or self.left_out(cluster) or not self._settings.common_rounds:
            return []
        self._enders.add(cluster)
        asked = [name for name in others if name not in self._told or name in self._excused]
        self._told.update(asked)
        self._excused.difference_update(asked)
        return [EndRound(cluster=name, reason=f"{cluster} has ended a round") for name in asked]

    def excuse(self, cluster: str) -> None:
        """Note that a cluster does not push for this window."""
        self._excused.add(cluster)

    def _end_window(self) -> None:
        self._window, self._spans_s = {}, {}
        self._enders, self._told, self._excused = set(), set(), set()

    def begin(self, now_s: float, ticket: Callable[[], Ticket], clusters: Collection[str]) -> list[OuterCommand]:
        """Begin an update, if the window has ended, or holds a push of every cluster that has one to give.

        `clusters`: those that train.
        """
        if not self._window or self._update:
            return []
        seeds = any(push.parameters for push in self._window.values())
        if now_s < self._window_ends_s and not seeds and not self._window.keys() | self._excused >= set(clusters):
            return []
        pushes = tuple(self._window.values())
        last_tokens = self._last_tokens(clusters, since=min(push.base_version for push in pushes))
        told = {push.cluster: push.tokens for push in pushes}
        spans_s = {push.cluster: self._spans_s.get(push.cluster, 0.0) for push in pushes}
        tokens, last_tokens = self._rates.counted(told, spans_s, last_tokens)
        weighing = weigh(
            pushes, version=self.state.version, tokens=tokens, last_tokens=last_tokens, settings=self._settings
        )
        self._update = Update(
            ticket(), pushes, weighing, self._layout, self._settings, self.state.guard, trains=clusters
        )
        self._begun_s = now_s
        self._end_window()
        return self._update.begin()

    def _last_tokens(self, clusters: Collection[str], *, since: int) -> Mapping[str, float]:
        """Return the tokens of the last push of each cluster that is there, or has one in version `since` or later."""
        here = {name: self._record(name) for name in clusters}
        gone = {
            name: one for name, one in self.state.clusters.items()
            if name not in clusters and one.last_push and one.last_tokens and one.version >= since
        }  # fmt: skip
        return {name: one.last_tokens for name, one in (here | gone).items() if not one.last_left_out}

    @property
    def missing(self) -> tuple[str, ...]:
        """Shards whose answers the update under way waits for."""
        return self._update.missing if self._update else ()

    def late_shards(self, now_s: float) -> tuple[str, ...]:
        """Return the shards that keep an update waiting for too long."""
        return self.missing if now_s >= self._begun_s + self._settings.transfer_limit_s else ()

    def heard(
        self, answer: Answer, keep: Collection[int], bases: Collection[int]
    ) -> list[OuterCommand] | None:  # fmt: skip
        """Take in a shard's answer; return what follows, None if nobody asked.

        `keep`: versions that are being pulled; `bases`: those that pushes begin from.

        Raises:
            ProtocolError: it does not tell what was asked; nothing has changed.
        """
        update = self._update
        if update is None or not update.heard(answer):
            return None
        if update.missing:
            return []
        match answer:
            case NormsMeasured():
                update.judge()
                if update.accepted and not update.seeds:
                    return update.combine()
            case MeanCombined():
                update.clip()
            case Staged():
                return self._decide(update, keep, bases)
            case Committed():
                self._update = None
                return []
        if not update.accepted or not math.isfinite(update.norm):
            return self._nothing(update)
        version = self.reserve()
        return [Save(reason=f"version {version} may be made"), *update.stage(version)]

    def reserve(self) -> int:
        """Return a number that no version had."""
        version = self.state.next_version
        self.state = replace(self.state, next_version=version + 1)
        return version

    def go_back(self, held: Collection[int]) -> tuple[int, int | None]:
        """Return the version that all shards go on with, and which of those that all hold has its content.

        It is the present one, if all hold that; else a new number for the newest that all hold. None: all is lost.
        """
        state = self.state
        if state.seeded and state.version in held:
            return state.version, state.version
        source = max((version for version in held if version < state.version), default=None)
        if not state.seeded or source is None:
            self.state = replace(state, seeded=False)
            return state.version, None
        version = self.reserve()
        self.state = replace(self.state, version=version)
        return version, source

    def uncount_last(self) -> dict[str, Ticket]:
        """Count the last push of each cluster no more, since all versions are lost; return those pushes.

        Who has not got a version with it pushes its tokens again; what others had in it is in nothing any more.
        """
        lost = {name: Ticket.parse(one.last_push) for name, one in self.state.clusters.items() if one.last_push}
        records = {
            name: replace(one, tokens=max(0, one.tokens - one.last_tokens), last_push="") if name in lost else one
            for name, one in self.state.clusters.items()
        }
        self.state = replace(self.state, clusters=records)
        return lost

    def _decide(self, update: Update, keep: Collection[int], bases: Collection[int]) -> list[OuterCommand]:
        version = update.version
        assert version is not None
        self._count(update, version)
        self.state = replace(self.state, version=version, seeded=True, updates=self.state.updates + 1)
        return [Save(reason=f"version {version} is decided"), *update.commit(keep, bases)]

    def _nothing(self, update: Update) -> list[OuterCommand]:
        """End an update that makes no version."""
        if not self.state.seeded:
            return self.abort(self._layout.shards, "the first parameters are not finite")
        self._count(update, self.state.version)
        self._update = None
        return [Save(reason="all pushes were left out"), *_forget(update.tickets, self._layout.shards, "left out")]

    def _count(self, update: Update, version: int) -> None:
        """Count an update's pushes, and keep what the guard learned."""
        self.last, records = update, dict(self.state.clusters)
        update.staleness = {push.cluster: max(0, self.state.version - push.base_version) for push in update.pushes}
        for push in update.pushes:
            before = self._record(push.cluster)
            records[push.cluster] = replace(
                before,
                tokens=min(before.tokens + push.tokens, _MAX_COUNTED),
                last_tokens=push.tokens,
                pushes=before.pushes + 1,
                left_out=before.left_out + (push not in update.accepted),
                staleness=before.staleness + update.staleness[push.cluster],
                version=version,
                last_push=str(push.ticket),
                last_left_out=push not in update.accepted,
            )
        self.counted += update.pushes
        left_out = len(update.pushes) - len(update.accepted)
        self.state = replace(self.state, clusters=records, guard=update.guard, left_out=self.state.left_out + left_out)

    def abort(self, shards: Collection[str], reason: str) -> list[OuterCommand]:
        """Give up what is not decided, since a shard is lost; `shards` are those that are left."""
        lost = self.pending
        tickets = [push.ticket for push in self._window.values()]
        if self._update and not self.committing:
            tickets = [*self._update.tickets, *tickets]
        self._update = None
        self._end_window()
        return [
            *_forget(tickets, shards, reason),
            *(SkipRound(cluster=push.cluster, push=push.ticket, reason=reason) for push in lost),
        ]


def _forget(tickets: Iterable[Ticket], shards: Collection[str], reason: str) -> list[OuterCommand]:
    return [Forget(shard=shard, ticket=ticket, reason=reason) for ticket in tickets for shard in shards]
