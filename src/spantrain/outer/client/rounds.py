"""A cluster's rounds, in its training loop: what its processes do between two steps, all at once.

The first process decides, by what it heard, and tells the others; so a version is taken by all between the same two
steps, and parameters are copied for a push at the same step.
"""

import time
from dataclasses import dataclass, replace

from spantrain.outer.client.metrics import ClientMeter
from spantrain.outer.client.ranks import Ranks
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.client.session import ClientSession, SessionUpdate
from spantrain.outer.client.watch import VersionWatch
from spantrain.outer.policy.round_steps import RoundSteps

_LOOKS_IN_A_ROUND = 16
"""How often several processes ask in a round whether there is something to do: so a version waits a sixteenth of a
round at most, and agreeing costs a sixteenth of what it would at every step. One process looks at every step."""


@dataclass(kw_only=True)
class _Tokens:
    """Trained on, and not known to be counted."""

    own: int = 0
    """Of this process, since the last push."""
    steps: int = 0
    """Since the last push: other processes may have tokens where this one has none."""
    waiting: int = 0
    """Of all, from pushes that came to nothing."""
    pushed: int = 0
    """Of all, in a push that has not ended."""

    @property
    def some(self) -> bool:
        return self.steps > 0 or self.waiting > 0


class ClientRounds:
    """Counts steps, asks for pushes, takes versions."""

    def __init__(
        self, copy: ClusterCopy, ranks: Ranks, session: ClientSession | None, meter: ClientMeter, *, steps: RoundSteps
    ) -> None:
        """Begin a round; `session`: of the first process; `steps`: when to push."""
        self._copy, self.ranks, self.session, self.meter = copy, ranks, session, meter
        self._steps = steps
        self._look_every = 1 if ranks.size == 1 else max(1, steps.inner_steps // _LOOKS_IN_A_ROUND)
        self._tokens = _Tokens()
        self._gave_up = False
        self._watch = VersionWatch(session, inner_steps=steps.inner_steps) if session else None

    def count(self, tokens: int) -> None:
        """Count a step."""
        self._steps.step()
        self.meter.inner_steps += 1
        self.meter.tokens += tokens
        self._tokens.own += tokens
        self._tokens.steps += 1
        if self.session and self._watch:
            self.session.stepped()
            self._watch.step()

    def waited(self, seconds: float) -> None:
        """Count a wait in which no step could be taken."""
        if self._watch:
            self._watch.waited(seconds)

    @property
    def is_time(self) -> bool:
        """Whether to look after this step."""
        return self.meter.inner_steps % self._look_every == 0

    def look(self, *, everything: bool = False) -> bool:
        """Take what has come, and push if it is time, or whatever there is to give; return whether a push began."""
        news, push = self._decided(everything)
        has = news.version is not None
        told = self.ranks.agree([news.skipped, has, news.version or 0, news.counted, push])
        self._take(news, skipped=bool(told[0]), version=told[2] if told[1] else None, counted=bool(told[3]))
        if told[4]:
            self._push()
        return bool(told[4])

    def _decided(self, everything: bool) -> tuple[SessionUpdate, bool]:
        if self.session is None:
            return SessionUpdate(), False
        news = self.session.take_news()
        if news.skipped:
            self._steps.come_to_nothing()
        if news.round_ended and not self._steps.end():
            self.session.keep_round()
        is_time = self._steps.is_over or everything
        some = self._tokens.some or (news.skipped and self._tokens.pushed > 0)
        return news, self.session.can_push and (self.session.wants_first or (is_time and some))

    def _take(self, news: SessionUpdate, *, skipped: bool, version: int | None, counted: bool) -> None:
        if skipped:
            self._copy.skipped()
            self._tokens.waiting, self._tokens.pushed = self._tokens.waiting + self._tokens.pushed, 0
        if version is not None:
            self._copy.pulled(news.tensors or {}, counted=counted, left_out=news.left_out)
            self.meter.version = version
            if self._watch:
                self._watch.came(version)
        if counted:
            self._tokens.pushed = 0

    def _push(self) -> None:
        begun_s = time.monotonic()
        taken, self._gave_up = self._copy.take(), False
        total = self.ranks.total(self._tokens.own)
        self.meter.tokens += total - self._tokens.own
        self._tokens = _Tokens(pushed=self._tokens.waiting + total)
        ends_round = self._steps.begin_push()
        if self.session:
            took_s = time.monotonic() - begun_s
            self.session.ask(taken, tokens=self._tokens.pushed, took_s=took_s, ends_round=ends_round)

    def part(
        self, copy: ClusterCopy, session: ClientSession | None, meter: ClientMeter, steps: RoundSteps
    ) -> "ClientRounds":
        """Return the rounds of a fragment of what these are of, where nothing was pushed yet."""
        part = ClientRounds(copy, self.ranks, session, meter, steps=steps)
        part._tokens = replace(self._tokens)
        return part

    # What may be waited for; asked in the first process.

    def has_begun(self) -> bool:
        """Whether a version is here, or this cluster brings the first."""
        session = self.session
        return self.meter.version > 0 or (session is not None and session.brings_first and session.pushing)

    def may_go_on(self) -> bool:
        """Whether to take another step; not where so many were taken behind a push that it is to be waited for."""
        session = self.session
        if session is None or self._gave_up:
            return True
        with session.changed:
            waits = session.registered and session.awaits
        return not (waits and self._steps.is_ahead(session.ahead))

    def give_up(self) -> None:
        """Wait for the present push no longer."""
        self._gave_up = True

    def has_given_all(self) -> bool:
        """Whether nothing is under way, and nothing left to give."""
        session = self.session
        if session is None or not session.registered or self._tokens.some:
            return False
        return not (session.pushing or session.pulling or session.refused or session.wants_first)
