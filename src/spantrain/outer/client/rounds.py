"""A cluster's rounds, in its training loop: what its processes do between two steps, all at once.

The first process decides, by what it heard, and tells the others; so a version is taken by all between the same two
steps, and parameters are copied for a push at the same step. Of a model in fragments each has rounds of its own; all
processes come to their number at the same look, before the first push, and what was trained on until then counts in
each. Here it is also said when a cluster has had no new version for long, what it waits for, and when that is over: how
long is too long its own rounds tell, in inner steps, and of what is shorter than the silence after which a member is
lost nothing is said.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spantrain.core.outer.layers import Layer, fragment_layers
from spantrain.outer.client.metrics import ClientMeter, FragmentMeter
from spantrain.outer.client.parameters import ModelParameters
from spantrain.outer.client.ranks import Ranks
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.client.session import ClientSession, SessionUpdate
from spantrain.outer.client.sessions import FragmentSessions
from spantrain.outer.policy.liveness import Overdue
from spantrain.outer.policy.pushes import RoundSteps
from spantrain.outer.policy.settings import OuterSettings

_LOG = logging.getLogger(__name__)


class VersionWatch:
    """For the training loop's thread; says it once, and again whenever twice as much has passed."""

    def __init__(
        self, session: ClientSession, *, inner_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._session, self._clock = session, clock
        self._version = Overdue(least=inner_steps)
        self._at, self._begun_from = 0.0, 0
        self._steps, self._waited_s = 0, 0.0
        self._begun_s = self._came_s = clock()

    def step(self) -> None:
        """Count an inner step."""
        self._steps += 1
        self._passed(1)

    def waited(self, seconds: float) -> None:
        """Count the time of a wait in which no step could be taken."""
        self._waited_s += seconds
        took_s = self._clock() - self._begun_s - self._waited_s
        if self._steps and took_s > 0:
            self._passed(seconds * self._steps / took_s)

    def _passed(self, steps: float) -> None:
        self._at += steps
        since_s = self._clock() - self._came_s
        settings = self._session.data.settings if self._session.data else OuterSettings()
        if since_s >= settings.lost_after_s and self._version.says(self._at):
            _LOG.warning(
                "cluster %s has had no new version for %.0f inner steps (%.3g s), usually it takes %.0f: it trains on "
                "from version %d by itself, and waits for %s",
                self._session.name, self._at - self._version.last, since_s, self._version.usual,
                self._begun_from, self._session.waits_for(),
            )  # fmt: skip

    def came(self, version: int) -> None:
        """Note a version."""
        late = self._version.came(self._at)
        if late is not None:
            took_s = self._clock() - self._came_s
            _LOG.warning(
                "cluster %s has version %d, after %.0f inner steps (%.3g s)", self._session.name, version, late, took_s
            )
        self._came_s, self._begun_from = self._clock(), version


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


_SLICE_S = 0.25


class FragmentRounds:
    """Counts steps, asks for pushes, takes versions."""

    def __init__(
        self, live: ModelParameters, layers: Sequence[Layer], ranks: Ranks, session: FragmentSessions | None,
        meter: ClientMeter, *, inner_steps: int,
    ) -> None:  # fmt: skip
        """Begin; `session`: of the first process, `layers`: of the whole model."""
        self._live, self._layers, self.ranks, self.session, self.meter = live, tuple(layers), ranks, session, meter
        self._copy = ClusterCopy(live)
        self._inner_steps = inner_steps
        self._settled = False
        first = session.sessions[0] if session else None
        self._rounds = [ClientRounds(self._copy, ranks, first, meter, steps=RoundSteps(inner_steps))]

    def count(self, tokens: int) -> None:
        """Count a step."""
        for one in self._rounds:
            one.count(tokens)

    @property
    def is_time(self) -> bool:
        """Whether to look after this step."""
        return self._rounds[0].is_time

    def look(self, *, everything: bool = False) -> bool:
        """Take what has come, and push what it is time for, or whatever there is; return whether a push began."""
        if not self._settled:
            self._agree()
        began = [one.look(everything=everything) for one in self._rounds]
        return any(began)

    def _agree(self) -> None:
        """Hear of the first process into how many fragments the model is divided."""
        count, settled = self.ranks.agree(self._known())
        if settled and count > 1:
            self._rounds = [self._part(number, count) for number in range(count)]
        self._settled = bool(settled)

    def _known(self) -> list[int]:
        if self.session is None:
            return [1, False]
        with self.session.changed:
            return [len(self.session.sessions), self.session.settled]

    def _part(self, number: int, count: int) -> ClientRounds:
        names = {one.name for layer in fragment_layers(self._layers, number, count) for one in layer.parameters}
        session = self.session.sessions[number] if self.session else None
        meter = (session.meter if session else FragmentMeter(self.meter, number)) if number else self.meter
        copy = self._copy.part(self._live.part(names), names)
        return self._rounds[0].part(
            copy, session, meter, RoundSteps(self._inner_steps, fragment=number, fragments=count)
        )

    # Waiting, where it was asked for.

    def stand_still(self, limit_s: float) -> None:
        """Wait for what a push becomes behind which as many steps as may be were taken; after so long, no longer."""
        if self.ranks.agree([self._is(ClientRounds.may_go_on)])[0] or self.until(ClientRounds.may_go_on, limit_s):
            return
        for one in self._rounds:
            one.give_up()

    def until(self, over: Callable[[ClientRounds], bool], limit_s: float, *, everything: bool = False) -> bool:
        """Look until something is over for all fragments; return whether it was, in time. The first process decides."""
        deadline_s = time.monotonic() + limit_s
        while True:
            heard = self.session.heard if self.session else 0
            self.look(everything=everything)
            late = time.monotonic() >= deadline_s
            ended, late = map(bool, self.ranks.agree([self._is(over), late]))
            if ended or late:
                return ended
            begun_s = time.monotonic()
            if self.session:
                self.session.wait(heard, min(_SLICE_S, max(0.0, deadline_s - begun_s)))
            for one in self._rounds:
                one.waited(time.monotonic() - begun_s)

    def _is(self, over: Callable[[ClientRounds], bool]) -> bool:
        if self.session is None or len(self.session.sessions) != len(self._rounds):
            return False
        return all(over(one) for one in self._rounds)
