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

from spantrain.core.outer.layers import Layer, fragment_layers
from spantrain.outer.client.metrics import ClientMeter
from spantrain.outer.client.parameters import ModelParameters
from spantrain.outer.client.ranks import Ranks
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.client.session import ClientSession, SessionUpdate
from spantrain.outer.client.sessions import FragmentSessions
from spantrain.outer.policy.liveness import Overdue
from spantrain.outer.policy.pushes import PushRounds
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


class ClientRounds:
    """Counts steps of a fragment, asks for pushes, takes versions."""

    def __init__(
        self, copy: ClusterCopy, ranks: Ranks, session: ClientSession | None, meter: ClientMeter | None, *,
        pushes: PushRounds,
    ) -> None:  # fmt: skip
        """Begin a round; `pushes` says when to push.

        `session`: of the first process, `meter`: of the first fragment, which counts for all.
        """
        self._copy, self._ranks, self._session, self._meter, self.pushes = copy, ranks, session, meter, pushes
        self.gave_up = False
        """Whether the present push is not waited for any longer."""
        self.watch = VersionWatch(session, inner_steps=pushes.inner_steps) if session else None

    def count(self, tokens: int) -> None:
        """Count a step."""
        self.pushes.step(tokens)
        if self._session and self.watch:
            self._session.stepped()
            self.watch.step()

    def look(self, *, everything: bool = False) -> None:
        """Take what has come, and push if it is time, or whatever there is to give."""
        update, due = self._decided(everything)
        told = self._ranks.agree([update.skipped, update.counted, due, update.version or 0])
        (skipped, counted, push), version = map(bool, told[:3]), told[3]
        if self._session is None:
            self.pushes.note(skipped=skipped, counted=counted)
        if skipped:
            self._copy.skipped()
        if version:
            self._copy.pulled(update.tensors, counted=counted, left_out=update.left_out)
            if self._meter:
                self._meter.version = version
            if self.watch:
                self.watch.came(version)
        if push:
            self._push()

    def _decided(self, everything: bool) -> tuple[SessionUpdate, bool]:
        session = self._session
        if session is None:
            return SessionUpdate(), False
        update = session.take_update()
        self.pushes.note(skipped=update.skipped, counted=update.counted)
        if update.round_ended and not self.pushes.end():
            session.keep_round()
        return update, session.can_push and self.pushes.is_due(first=session.wants_first, everything=everything)

    def _push(self) -> None:
        begun_s = time.monotonic()
        taken, self.gave_up = self._copy.take(), False
        own = self.pushes.tokens
        total = self._ranks.total(own)
        if self._meter:
            self._meter.tokens += total - own
        tokens = self.pushes.begin_push(total)
        if self._session:
            took_s = time.monotonic() - begun_s
            self._session.ask(taken, tokens=tokens, took_s=took_s, ends_round=self.pushes.ends_round)

    # What may be waited for; asked in the first process.

    def has_begun(self) -> bool:
        """Whether a version is here, or this cluster brings the first."""
        return self._session is not None and self._session.has_begun

    def may_go_on(self) -> bool:
        """Whether to take another step; not where so many were taken behind a push that it is to be waited for."""
        session = self._session
        if session is None or self.gave_up:
            return True
        with session.changed:
            waits = session.registered and session.awaits
        return not (waits and self.pushes.is_ahead(session.ahead))

    def has_given_all(self) -> bool:
        """Whether nothing is under way, and nothing left to give."""
        return self._session is not None and self._session.is_idle and not self.pushes.has_some


_SLICE_S = 0.25


class FragmentRounds:
    """Counts steps, asks for pushes, takes versions: of all fragments."""

    def __init__(
        self, live: ModelParameters, layers: Sequence[Layer], ranks: Ranks, session: FragmentSessions | None, *,
        inner_steps: int,
    ) -> None:  # fmt: skip
        """Begin; `session`: of the first process, `layers`: of the whole model."""
        self._live, self._layers, self.ranks, self.session = live, tuple(layers), ranks, session
        self.meter = session.meter if session else ClientMeter()
        self._copy = ClusterCopy(live)
        self._settled = False
        self._look_every = 1 if ranks.size == 1 else max(1, inner_steps // _LOOKS_IN_A_ROUND)
        first = session.sessions[0] if session else None
        self._rounds = [ClientRounds(self._copy, ranks, first, self.meter, pushes=PushRounds(inner_steps))]

    def count(self, tokens: int) -> None:
        """Count a step."""
        self.meter.inner_steps += 1
        self.meter.tokens += tokens
        for one in self._rounds:
            one.count(tokens)

    @property
    def is_time(self) -> bool:
        """Whether to look after this step."""
        return self.meter.inner_steps % self._look_every == 0

    def look(self, *, everything: bool = False) -> None:
        """Take what has come, and push what it is time for, or whatever there is."""
        if not self._settled:
            self._settle()
        for one in self._rounds:
            one.look(everything=everything)

    def _settle(self) -> None:
        """Hear of the first process into how many fragments the model is divided."""
        known = [1, False]
        if self.session:
            with self.session.changed:
                known = [len(self.session.sessions), self.session.settled]
        count, settled = self.ranks.agree(known)
        if settled and count > 1:
            self._rounds = [self._part(number, count) for number in range(count)]
        self._settled = bool(settled)

    def _part(self, number: int, count: int) -> ClientRounds:
        names = {one.name for layer in fragment_layers(self._layers, number, count) for one in layer.parameters}
        session, meter = self.session.sessions[number] if self.session else None, None if number else self.meter
        copy, pushes = self._copy.part(self._live.part(names), names), self._rounds[0].pushes.part(number, count)
        return ClientRounds(copy, self.ranks, session, meter, pushes=pushes)

    # Waiting, where it was asked for.

    def stand_still(self, limit_s: float) -> None:
        """Wait for what a push becomes behind which as many steps as may be were taken; after so long, no longer."""
        if self.ranks.agree([self._is(ClientRounds.may_go_on)])[0] or self.until(ClientRounds.may_go_on, limit_s):
            return
        for one in self._rounds:
            one.gave_up = True

    def until(self, over: Callable[[ClientRounds], bool], limit_s: float, *, everything: bool = False) -> bool:
        """Look until something is over for all fragments; return whether it was, in time. The first process decides."""
        deadline_s = time.monotonic() + limit_s
        while True:
            heard = self.session.heard if self.session else 0
            self.look(everything=everything)
            late = time.monotonic() >= deadline_s or bool(self.session and self.session.refused)
            ended, late = map(bool, self.ranks.agree([self._is(over), late]))
            if ended or late:
                return ended
            begun_s = time.monotonic()
            if self.session:
                self.session.wait(heard, min(_SLICE_S, max(0.0, deadline_s - begun_s)))
            for one in self._rounds:
                if one.watch:
                    one.watch.waited(time.monotonic() - begun_s)

    def _is(self, over: Callable[[ClientRounds], bool]) -> bool:
        if self.session is None or len(self.session.sessions) != len(self._rounds):
            return False
        return all(over(one) for one in self._rounds)
