"""Links that transfers share, on a virtual clock."""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from spantrain.core.speed import SpeedTrace
from spantrain.sim.clock import VirtualClock
from spantrain.sim.network.link import Link
from spantrain.sim.network.mesh import Mesh
from spantrain.sim.network.sending import Arrived, Lane, Sending, Transfer

_NO_TRACES: Mapping[str, SpeedTrace] = MappingProxyType({})


class Network:
    """Carries messages: each pair of devices sends one after the other, links are shared by pairs.

    A pair is one connection. On a shared link connections get equal parts of the bandwidth (`fair`), as TCP flows
    through one router do, or are served by turn. A message that takes several links goes as fast as the one of them
    that leaves it least; what it leaves of the others is for others (max-min fair sharing). `speeds` says of some
    links how their bandwidth changes over time.
    """

    def __init__(
        self, clock: VirtualClock, *, fair: bool = True, speeds: Mapping[str, SpeedTrace] = _NO_TRACES
    ) -> None:
        self._clock = clock
        self._fair = fair
        self._speeds = speeds
        self._carriers: dict[str, Link | Mesh] = {}
        self._mesh = Mesh(clock, self._ended, fair=fair, speeds=speeds)
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._lane_of: dict[Sending, Lane] = {}
        """Of messages that others wait for."""

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links that have carried anything."""
        return tuple(self._carriers)

    def send(self, source: str, target: str, transfer: Transfer, arrived: Arrived) -> None:
        """Carry a message; call `arrived(start_s, sent_s)` when it is there: when it left, and had left altogether."""
        lane = self._lanes.get((source, target))
        if lane is None:
            lane = self._lanes[source, target] = deque()
        sending = Sending(transfer, arrived)
        if lane:
            first = lane[0]
            if first.end_s is None or first.end_s > self._clock.now_s:
                lane.append(sending)
                self._wait_for(first, lane)
                return
            # It has left and nobody has waited for that.
            lane.popleft()
        lane.append(sending)
        self._carrier(transfer).add(sending)

    def _wait_for(self, first: Sending, lane: Lane) -> None:
        if first not in self._lane_of:
            self._lane_of[first] = lane
            carrier = self._carriers[first.transfer.links[0]]
            if isinstance(carrier, Link):
                carrier.tell_end(first)

    def _ended(self, sending: Sending) -> None:
        """Let the next message of the connection follow, if one waits."""
        lane = self._lane_of.pop(sending, None)
        if lane is None:
            return
        lane.popleft()
        following = lane[0]
        if len(lane) > 1:
            self._lane_of[following] = lane
        carrier = self._carrier(following.transfer)
        carrier.add(following)
        if len(lane) > 1 and isinstance(carrier, Link):
            carrier.tell_end(following)

    def _carrier(self, transfer: Transfer) -> Link | Mesh:
        """Return what carries a message: its only link, or the mesh if it takes several or only a part of one."""
        links = transfer.links
        carrier = self._carriers.get(links[0])
        alone = len(links) == 1 and (not transfer.usage or transfer.usage[0] == 1.0)
        if alone and carrier is not None:
            return carrier
        if alone:
            speed = self._speeds.get(links[0])
            made = self._carriers[links[0]] = Link(self._clock, self._ended, fair=self._fair, speed=speed)
            return made
        for name in links:
            carrier = self._carriers.get(name)
            if carrier is not self._mesh:
                self._carriers[name] = self._mesh
                for sending in carrier.withdraw() if isinstance(carrier, Link) else ():
                    self._mesh.take_over(sending)
        return self._mesh
