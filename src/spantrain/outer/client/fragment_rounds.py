"""The rounds of all fragments of a cluster's model, in its training loop; one fragment is the whole.

All processes come to the number of fragments at the same look, before the first push; what was trained on until then
counts in each.
"""

import time
from collections.abc import Callable, Sequence

from spantrain.core.outer.layers import Layer
from spantrain.outer.client.fragment_sessions import FragmentSessions
from spantrain.outer.client.metrics import ClientMeter, FragmentMeter
from spantrain.outer.client.parameters import ModelParameters
from spantrain.outer.client.ranks import Ranks
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.client.rounds import ClientRounds
from spantrain.outer.policy.layout import fragment_layers
from spantrain.outer.policy.round_steps import RoundSteps

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
