"""Links that transfers share, on a virtual clock; a message may need several at once."""

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from spantrain.core.speed import SpeedTrace
from spantrain.cost.network import Demand, fair_parts, part_alone
from spantrain.sim.transfers import Arrived, Sending, TransferCost, VirtualClock

_ROUNDING = 1e-9
"""What sums of parts of a link may be wrong by."""

_KEPT = 10_000
"""Groups of messages of which the parts are kept."""

_NO_TRACES: Mapping[str, SpeedTrace] = MappingProxyType({})


class Network:
    """Carries messages: each pair of devices sends one after the other, links are shared by pairs.

    A pair is one connection. On a shared link connections get equal parts of the bandwidth, as TCP flows through one
    router do. A message that takes several links goes as fast as the one of them
    that leaves it least; what it leaves of the others is for others (max-min fair sharing). `speeds` says of some
    links how their bandwidth changes over time.

    A link on which all messages together ask for no more than it has makes nobody slower. So a message that comes or
    goes changes the speeds only of those that it reaches over links which are asked for more than they have.
    """

    def __init__(self, clock: VirtualClock, *, speeds: Mapping[str, SpeedTrace] = _NO_TRACES) -> None:
        self._clock = clock
        self._speeds = speeds
        self._lanes: dict[tuple[str, str], deque[Sending]] = {}
        """By sender and receiver: what is still to be sent; the first one is on its links."""
        self._on: dict[str, dict[Sending, float]] = {}
        """By link, in the order in which they came: what is on it, and the part that each takes at full speed."""
        self._partly: set[str] = set()
        """Links that have carried a message which takes others, too, or not all of one."""
        self._changed: dict[Sending, None] = {}
        """What came, or may go faster, at this moment."""
        self._numbers: dict[int, tuple[int, TransferCost]] = {}
        """Of each transfer, by its identity: as many for what asks as much of the same links. It is kept, or others
        could get its identity."""
        self._demands: dict[Demand, int] = {}
        self._known_parts: dict[tuple[int, ...], dict[int, float]] = {}
        """By the numbers of what is sent, where links have one speed: the fair part of each."""
        self._watched: set[str] = set()
        """Links whose next change of speed is waited for."""

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links that have carried anything."""
        return tuple(self._on)

    def send(self, source: str, target: str, transfer: TransferCost, arrived: Arrived) -> None:
        """Carry a message; call `arrived(start_s, sent_s)` when it is there: when it left, and had left altogether."""
        lane = self._lanes.get((source, target))
        if lane is None:
            lane = self._lanes[source, target] = deque()
        lane.append(Sending(transfer, arrived, lane))
        if len(lane) == 1:
            self._begin(lane[0])

    def _begin(self, sending: Sending) -> None:
        """Put a message on its links."""
        sending.start_s = sending.since_s = self._clock.now_s
        uses = sending.transfer.uses
        if len(uses) > 1 or uses[0][1] < 1.0:
            self._partly.update(sending.transfer.links)
        alone = not self._speeds and uses[0][0] not in self._partly
        for link, part in uses:
            on = self._on.get(link)
            if on is None:
                on = self._on[link] = {}
            on[sending] = part
            alone = alone and len(on) == 1
            if link in self._speeds:
                self._watch(link)
        if alone:
            self._go_on(sending, 1.0)
            self._arrive_at(sending.since_s + sending.left_s + sending.transfer.latency_s, sending)
        else:
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
                done.update(self._share(sending))

    def _share(self, changed: Sending) -> list[Sending]:
        """Find new speeds for all that a message affects, and plan their ends; return what they are of."""
        group, is_crowded = self._group(changed)
        parts = self._parts(group) if is_crowded or self._speeds else [1.0] * len(group)
        for sending, part in zip(group, parts, strict=True):
            if part != sending.part:
                self._go_on(sending, part)
        return group

    def _go_on(self, sending: Sending, part: float) -> None:
        """Give a message a part of its full speed from now on, and plan its end."""
        now_s = self._clock.now_s
        sending.left_s = max(0.0, sending.left_s - (now_s - sending.since_s) * sending.part)
        sending.since_s, sending.part = now_s, part
        sending.version += 1
        if part > 0 or sending.left_s == 0:
            wait_s = sending.left_s / part if sending.left_s else 0.0
            self._clock.at(now_s + wait_s, self._end, sending, sending.version)

    def _group(self, changed: Sending) -> tuple[list[Sending], bool]:
        """Return what a message reaches over crowded links, with it, and whether there is such a link."""
        group, seen, known = [changed], set[str](), {changed}
        is_crowded = False
        for sending in group:  # grows while it is walked
            for link in sending.transfer.links:
                on = self._on[link]
                if len(on) > 1 and link not in seen:
                    seen.add(link)
                    if self._is_crowded(link):
                        is_crowded = True
                        new = [other for other in on if other not in known]
                        known.update(new)
                        group += new
        return group, is_crowded

    def _is_crowded(self, link: str) -> bool:
        # Where there is more than usual, messages ask for more, too.
        return sum(self._on[link].values()) > min(1.0, self._speed_of(link)) + _ROUNDING

    def _parts(self, group: list[Sending]) -> list[float]:
        """Return the part of its full speed that each gets; the same messages meet again and again."""
        link = group[0].transfer.links[0]
        if link not in self._partly:
            return [self._speed_of(link) / len(group)] * len(group)
        if self._speeds:
            return self._fair_parts(group)
        numbers = [self._number(sending.transfer) for sending in group]
        key = tuple(sorted(numbers))
        known = self._known_parts.get(key)
        if known is None:
            if len(self._known_parts) >= _KEPT:
                self._known_parts.clear()
            known = self._known_parts[key] = dict(zip(numbers, self._fair_parts(group), strict=True))
        return [known[number] for number in numbers]

    def _number(self, transfer: TransferCost) -> int:
        known = self._numbers.get(id(transfer))
        if known is None:
            demand = transfer.bandwidth_bytes_per_s, transfer.uses
            number = self._demands.setdefault(demand, len(self._demands))
            known = self._numbers[id(transfer)] = number, transfer
        return known[0]

    def _fair_parts(self, group: list[Sending]) -> list[float]:
        capacity = {link: self._speed_of(link) for sending in group for link in sending.transfer.links}
        if len(group) == 1:
            return [part_alone(group[0].transfer.uses, capacity)]
        return fair_parts([(one.transfer.bandwidth_bytes_per_s, one.transfer.uses) for one in group], capacity)

    def _end(self, sending: Sending, version: int) -> None:
        """Take a message off its links, and let the next one of its connection follow."""
        if version != sending.version:
            return  # the shares have changed since
        now_s = sending.end_s = self._clock.now_s
        freed: dict[Sending, None] = {}
        for link in sending.transfer.links:
            on = self._on[link]
            was_crowded = len(on) > 1 and self._is_crowded(link)
            del on[sending]
            if was_crowded:
                freed.update(dict.fromkeys(on))
        if sending.arrives != version:
            self._arrive_at(now_s + sending.transfer.latency_s, sending)
        if freed:
            self._share_soon(freed)
        sending.lane.popleft()
        if sending.lane:
            self._begin(sending.lane[0])

    def _arrive_at(self, time_s: float, sending: Sending) -> None:
        sending.arrives = sending.version
        self._clock.at(time_s, sending.arrive, sending.version)

    def _speed_of(self, link: str) -> float:
        trace = self._speeds.get(link)
        return 1.0 if trace is None else trace.speed_at(self._clock.now_s)

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
