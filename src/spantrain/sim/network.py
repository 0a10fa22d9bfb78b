"""Links that transfers share, on a virtual clock: one link alone, or several that a message needs at once."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from spantrain.core.speed import SpeedTrace
from spantrain.cost.network import fair_parts, part_alone
from spantrain.sim.transfers import Arrived, Lane, Sending, TransferCost, VirtualClock

Ended = Callable[[Sending], None]
_ROUNDING = 1e-9
"""What sums of parts of a link may be wrong by."""

_FEW = 16
"""Messages, up to which groups of them are likely to meet again as they are."""
_UNPLANNED = -1.0
"""Stands for a speed that has not been found yet."""


class Mesh:
    """All messages that take several links, and those that share one of these links with them.

    A link on which all messages together ask for no more than it has makes nobody slower. So a message that comes or
    goes changes the speeds only of those that it reaches over links which are asked for more than they have.
    """

    def __init__(self, clock: VirtualClock, ended: Ended, speeds: Mapping[str, SpeedTrace]) -> None:
        self._clock = clock
        self._ended = ended
        self._speeds = speeds
        self._on: dict[str, dict[Sending, float]] = {}
        """By link, in the order in which they came: what is on it, and the part that each takes at full speed."""
        self._changed: dict[Sending, None] = {}
        """What came, or may go faster, at this moment."""
        self._known_parts: dict[tuple[int, ...], tuple[list[Sending], list[float]]] = {}
        """By the identities of what is sent, where links have one speed: messages with them, and their fair parts."""
        self._watched: set[str] = set()
        """Links whose next change of speed is waited for."""

    def add(self, sending: Sending) -> None:
        """Begin to carry a message."""
        sending.start_s = self._clock.now_s
        self.take_over(sending)

    def take_over(self, sending: Sending) -> None:
        """Go on with a message that was under way elsewhere, with the work that is left."""
        sending.since_s = self._clock.now_s
        sending.part = _UNPLANNED
        for link, part in sending.transfer.uses:
            on = self._on.get(link)
            if on is None:
                on = self._on[link] = {}
            on[sending] = part
            if link in self._speeds:
                self._watch(link)
        self._share_soon([sending])

    def _share_soon(self, changed: Iterable[Sending]) -> None:
        """Find new speeds when all that happens at this moment has happened."""
        if not self._changed:
            self._clock.at(self._clock.now_s, self._share_all, last=True)
        self._changed.update(dict.fromkeys(changed))

    def _share_all(self) -> None:
        changed, self._changed = self._changed, {}
        done: set[Sending] = set()
        for sending in changed:
            if sending.end_s is None and sending not in done:
                done.update(self._share(sending, self._clock.now_s))

    def _share(self, changed: Sending, now_s: float) -> list[Sending]:
        """Find new speeds for all that a message affects, and plan their ends; return what they are of."""
        group, is_crowded = self._group([changed], now_s)
        parts = self._parts(group, now_s) if is_crowded or self._speeds else [1.0] * len(group)
        for sending, part in zip(group, parts, strict=True):
            if part == sending.part:
                continue  # it goes on as planned
            sending.left_s = max(0.0, sending.left_s - (now_s - sending.since_s) * sending.part)
            sending.since_s = now_s
            sending.part = part
            sending.version += 1
            if part > 0 or sending.left_s == 0:
                wait_s = sending.left_s / part if sending.left_s else 0.0
                self._clock.at(now_s + wait_s, self._end, sending, sending.version)
        return group

    def _group(self, changed: list[Sending], now_s: float) -> tuple[list[Sending], bool]:
        """Return what these messages reach over crowded links, with them, and whether there is such a link."""
        group, seen, known = changed, set[str](), set(changed)
        is_crowded = False
        for sending in group:  # grows while it is walked
            for link in sending.transfer.links:
                on = self._on[link]
                if len(on) > 1 and link not in seen:
                    seen.add(link)
                    if self._is_crowded(link, on, now_s):
                        is_crowded = True
                        new = [other for other in on if other not in known]
                        known.update(new)
                        group += new
        return group, is_crowded

    def _is_crowded(self, link: str, on: Mapping[Sending, float], now_s: float) -> bool:
        return sum(on.values()) > self._speed_of(link, now_s) + _ROUNDING

    def _parts(self, group: list[Sending], now_s: float) -> list[float]:
        """Return the part of its full speed that each gets; the same messages meet again and again."""
        if self._speeds or len(group) > _FEW:
            return self._parts_now(group, now_s)
        key = tuple(id(sending.transfer) for sending in group)
        known = self._known_parts.get(key)
        if known is None:
            # The messages are kept, or others could get the identities of what they send.
            known = self._known_parts[key] = (group, self._parts_now(group, now_s))
        return known[1]

    def _parts_now(self, group: Sequence[Sending], now_s: float) -> list[float]:
        links = dict.fromkeys(link for sending in group for link in sending.transfer.links)
        capacity = {link: self._speed_of(link, now_s) for link in links}
        if len(group) == 1:
            return [part_alone(group[0].transfer.uses, capacity)]
        return fair_parts([(one.transfer.bandwidth_bytes_per_s, one.transfer.uses) for one in group], capacity)

    def _end(self, sending: Sending, version: int) -> None:
        if version != sending.version:
            return  # the shares have changed since
        now_s = sending.end_s = self._clock.now_s
        freed: dict[Sending, None] = {}
        for link in sending.transfer.links:
            on = self._on[link]
            was_crowded = len(on) > 1 and self._is_crowded(link, on, now_s)
            del on[sending]
            if was_crowded:
                freed.update(dict.fromkeys(on))
        self._clock.at(now_s + sending.transfer.latency_s, sending.arrive, sending.version)
        if freed:
            self._share_soon(freed)
        self._ended(sending)

    def _speed_of(self, link: str, now_s: float) -> float:
        trace = self._speeds.get(link)
        return 1.0 if trace is None else trace.speed_at(now_s)

    def _watch(self, link: str) -> None:
        """Ask to be called when a link changes its speed, as long as anything is on it."""
        change_s = self._speeds[link].next_change_s(self._clock.now_s)
        if change_s is not None and link not in self._watched:
            self._watched.add(link)
            self._clock.at(change_s, self._change, link)

    def _change(self, link: str) -> None:
        self._watched.discard(link)
        if self._on[link]:
            self._watch(link)
            self._share_soon(self._on[link])


class LinkCarrier:
    """Serves its messages at once, in equal shares.

    A message that is alone needs no event for its last byte: when that leaves is known (`Sending.end_s`) until another
    message comes. Only then, or when something waits for it (`tell_end`), is it watched.
    """

    def __init__(self, clock: VirtualClock, ended: Ended, speed: SpeedTrace | None) -> None:
        self._clock = clock
        self._ended = ended
        self._speed = speed
        self._alone: Sending | None = None
        self._sendings: list[Sending] = []
        self._since_s = 0.0
        self._version = 0

    def add(self, sending: Sending) -> None:
        """Begin to carry a message."""
        now_s = sending.start_s = self._clock.now_s
        alone = self._alone
        if alone is not None:
            assert alone.end_s is not None
            if alone.end_s > now_s:
                self._watch(alone, now_s)
            self._alone = None
        if not self._sendings:
            self._carry_alone(sending, now_s)
            return
        self._advance(now_s)
        self._sendings.append(sending)
        self._plan_next(now_s)

    def tell_end(self, sending: Sending) -> None:
        """Say so when the message that is alone on the link has left."""
        if sending is self._alone:
            assert sending.end_s is not None
            self._clock.at(sending.end_s, self._end_alone, sending, sending.version)

    def withdraw(self) -> list[Sending]:
        """Return what is on the link with the work that is left, and stop carrying it."""
        now_s = self._clock.now_s
        alone = self._alone
        if alone is not None and alone.end_s is not None and alone.end_s > now_s:
            self._watch(alone, now_s)
        self._alone = None
        if self._sendings:
            self._advance(now_s)
        taken, self._sendings = self._sendings, []
        self._version += 1
        return taken

    def _carry_alone(self, sending: Sending, now_s: float) -> None:
        work_s = sending.left_s
        end_s = sending.end_s = now_s + work_s if self._speed is None else self._speed.end_s(now_s, work_s)
        self._alone = sending
        self._clock.at(end_s + sending.transfer.latency_s, sending.arrive, sending.version)

    def _end_alone(self, sending: Sending, version: int) -> None:
        if version == sending.version:
            self._alone = None
            self._ended(sending)

    def _watch(self, alone: Sending, now_s: float) -> None:
        """Take back what was planned for a message that is not alone any more."""
        alone.version += 1
        alone.end_s = None
        self._sendings = [alone]
        self._since_s = alone.start_s
        self._advance(now_s)

    def _advance(self, now_s: float) -> None:
        """Take what has been done since the last change off what is served."""
        if now_s > self._since_s:
            done_s = now_s - self._since_s if self._speed is None else self._speed.work_s(self._since_s, now_s)
            for sending in self._sendings:
                sending.left_s = max(0.0, sending.left_s - done_s / len(self._sendings))
            self._since_s = now_s

    def _plan_next(self, now_s: float) -> None:
        """Ask to be called when the next one of what is served will be through."""
        self._version += 1
        first = min(self._sendings, key=attrgetter("left_s"))
        work_s = first.left_s * len(self._sendings)
        end_s = now_s + work_s if self._speed is None else self._speed.end_s(now_s, work_s)
        self._clock.at(end_s, self._end, first, self._version)

    def _end(self, sending: Sending, version: int) -> None:
        if version != self._version:
            return  # the shares have changed since
        sent_s = sending.end_s = self._clock.now_s
        if len(self._sendings) == 1:
            self._sendings.clear()
        else:
            self._advance(sent_s)
            self._sendings.remove(sending)
            self._plan_next(sent_s)
        self._clock.at(sent_s + sending.transfer.latency_s, sending.arrive, sending.version)
        self._ended(sending)


_NO_TRACES: Mapping[str, SpeedTrace] = MappingProxyType({})


class Network:
    """Carries messages: each pair of devices sends one after the other, links are shared by pairs.

    A pair is one connection. On a shared link connections get equal parts of the bandwidth, as TCP flows through one
    router do. A message that takes several links goes as fast as the one of them
    that leaves it least; what it leaves of the others is for others (max-min fair sharing). `speeds` says of some
    links how their bandwidth changes over time.
    """

    def __init__(self, clock: VirtualClock, *, speeds: Mapping[str, SpeedTrace] = _NO_TRACES) -> None:
        self._clock = clock
        self._speeds = speeds
        self._carriers: dict[str, LinkCarrier | Mesh] = {}
        self._mesh = Mesh(clock, self._ended, speeds)
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._lane_of: dict[Sending, Lane] = {}
        """The connection of each message that others wait for."""

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links that have carried anything."""
        return tuple(self._carriers)

    def send(self, source: str, target: str, transfer: TransferCost, arrived: Arrived) -> None:
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
            if isinstance(carrier, LinkCarrier):
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
        if len(lane) > 1 and isinstance(carrier, LinkCarrier):
            carrier.tell_end(following)

    def _carrier(self, transfer: TransferCost) -> LinkCarrier | Mesh:
        """Return what carries a message: its only link, or the mesh if it takes several or only a part of one."""
        links = transfer.links
        carrier = self._carriers.get(links[0])
        alone = len(links) == 1 and (not transfer.usage or transfer.usage[0] == 1.0)
        if alone and carrier is not None:
            return carrier
        if alone:
            made = self._carriers[links[0]] = LinkCarrier(self._clock, self._ended, self._speeds.get(links[0]))
            return made
        for name in links:
            carrier = self._carriers.get(name)
            if carrier is not self._mesh:
                self._carriers[name] = self._mesh
                for sending in carrier.withdraw() if isinstance(carrier, LinkCarrier) else ():
                    self._mesh.take_over(sending)
        return self._mesh
