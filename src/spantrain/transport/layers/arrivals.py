"""Layers that come: only what is expected is taken in; what comes a little early waits, within bounds."""

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spantrain.core.outer.events import Ticket
from spantrain.core.outer.layers import ParameterSpec
from spantrain.transport.connection.bounds import Refusal, printable
from spantrain.transport.layers import format as wire
from spantrain.transport.layers.copiers import BufferPool, ComingLayer, Copiers
from spantrain.transport.layers.interface import CONTROL, LayerKey, LayerLimits, LayerLink, tell

_EARLY_LAYERS, _EARLY_PARAMETERS = 64, 16384
"""That one peer may open before they are expected: layers, and parameters in all of them."""
_PIECES = 256
_PIECE_BYTES = 16384
"""Of a window's bytes so many may wait for each piece on average, and some more: each costs memory of its own. Whoever
sends makes pieces of 64 KiB and, between two such, at most two smaller ones."""
_ENDED_TICKETS = 1000
"""That are remembered as forgotten, so that what still comes of them is told off at once."""


@dataclass(eq=False)
class _EarlyLayer:
    """Opened, and not expected yet."""

    opening: wire.Opening
    came_s: float
    parked: list[memoryview] = field(default_factory=list)


@dataclass(eq=False)
class _Expected:
    """Wanted from a peer, and not opened yet."""

    parameters: tuple[ParameterSpec, ...]
    since_s: float


@dataclass(eq=False)
class _FromPeer:
    """What comes from one peer."""

    expected: dict[LayerKey, _Expected] = field(default_factory=dict)
    early: dict[int, _EarlyLayer] = field(default_factory=dict)
    coming: dict[int, ComingLayer] = field(default_factory=dict)
    came_s: float = 0.0
    """When the last piece came, or a layer began."""


class Arrivals:
    """All that comes; owned by the thread of the sockets, but for what the copiers do."""

    def __init__(
        self, limits: LayerLimits, pool: BufferPool, copiers: Copiers, *, lost: Callable[[str, LayerKey, str], None]
    ) -> None:
        self._limits, self._pool, self._copiers = limits, pool, copiers
        self._max_pieces = _PIECES + limits.window_bytes // _PIECE_BYTES
        self._lost = lost
        self._by_peer: defaultdict[str, _FromPeer] = defaultdict(_FromPeer)
        self._ended: OrderedDict[Ticket, None] = OrderedDict()
        self._lock = threading.Lock()
        self._open: set[ComingLayer] = set()
        self.whole_layers = 0
        self.bytes_by_peer: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        """Whether something is expected, or on its way."""
        return any(theirs.expected or theirs.early or theirs.coming for theirs in self._by_peer.values())

    def claim(self, layer: ComingLayer) -> bool:
        """Take a layer out, whole or given up: whoever gets True, a copier or the sockets' thread, tells of its end."""
        with self._lock:
            ours = layer in self._open
            self._open.discard(layer)
        return ours

    # What this side wants.

    def expect(
        self, link: LayerLink | None, peer: str, key: LayerKey, parameters: Sequence[ParameterSpec], now_s: float
    ) -> None:
        """Want a layer from a peer; it may have been opened already."""
        theirs = self._by_peer[peer]
        self._ended.pop(key.ticket, None)
        theirs.expected[key] = _Expected(tuple(parameters), now_s)
        early = next((one for one in theirs.early.values() if one.opening.key == key), None)
        if early is not None and link is not None:
            del theirs.early[early.opening.number]
            self._begin(link, theirs, early, now_s)

    def forget(self, ticket: Ticket, links: Mapping[str, LayerLink]) -> None:
        """Want nothing of a push or a pull any more."""
        self._ended[ticket] = None
        while len(self._ended) > _ENDED_TICKETS:
            self._ended.popitem(last=False)
        for peer, theirs in self._by_peer.items():
            for key in [key for key in theirs.expected if key.ticket == ticket]:
                del theirs.expected[key]
            early = [number for number, one in theirs.early.items() if one.opening.key.ticket == ticket]
            for number in early:
                del theirs.early[number]
            coming = [number for number, one in theirs.coming.items() if one.key.ticket == ticket]
            for number in coming:
                self.claim(theirs.coming.pop(number))
            for number in [*early, *coming]:
                tell(links.get(peer), CONTROL, wire.encode_refused(number, f"{ticket} has ended"))

    # What comes.

    def opened(self, link: LayerLink, opening: wire.Opening, now_s: float) -> None:
        """Take in the opening of a layer.

        Raises:
            Refusal: it is not as expected, or too much at once.
        """
        theirs = self._by_peer[link.name]
        number, key = opening.number, opening.key
        if number in theirs.early or number in theirs.coming:
            raise Refusal("malformed", f"{key}: opened twice")
        if (size_bytes := sum(one.size_bytes for one in opening.parameters)) > self._limits.layer_bytes:
            detail = f"{size_bytes} bytes, at most {self._limits.layer_bytes} are allowed"
            self._refuse(link, number, key, "oversized", detail)
        if key.ticket in self._ended:
            tell(link, CONTROL, wire.encode_refused(number, f"{key.ticket} has ended"))
            return
        early = _EarlyLayer(opening, now_s)
        parameters = sum(len(one.opening.parameters) for one in [*theirs.early.values(), early])
        if key in theirs.expected:
            self._begin(link, theirs, early, now_s)
        elif len(theirs.early) < _EARLY_LAYERS and parameters <= _EARLY_PARAMETERS:
            theirs.early[number] = early
        else:
            self._refuse(link, number, key, "not expected", f"{key}, nor {len(theirs.early)} before it")

    def _begin(self, link: LayerLink, theirs: _FromPeer, early: _EarlyLayer, now_s: float) -> None:
        opening, expected = early.opening, theirs.expected.pop(early.opening.key)
        theirs.came_s = now_s
        told = wire.unlike(opening.parameters, expected.parameters)
        if told:
            reason = printable(f"{told}; the models at both ends must be the same")
            self._lost(link.name, opening.key, reason)
            self._refuse(link, opening.number, opening.key, "not as expected", reason)
            return
        layer = ComingLayer(link.name, opening.key, opening.number, opening.parameters, self._pool)
        theirs.coming[opening.number] = layer
        with self._lock:
            self._open.add(layer)
        self._grant(link, layer)
        for piece in early.parked:
            self._take(link, theirs, layer, piece, now_s)

    def _refuse(self, link: LayerLink, number: int, key: LayerKey, reason: str, detail: str) -> None:
        """Tell the sender, and have it counted.

        Raises:
            Refusal: always.
        """
        tell(link, CONTROL, wire.encode_refused(number, f"{reason}: {detail}"))
        raise Refusal(reason, f"{key}: {detail}")

    def data(self, link: LayerLink, number: int, offset_bytes: int, piece: memoryview, now_s: float) -> None:
        """Take in a piece of a layer; of one that was given up it is dropped.

        Raises:
            Refusal: it is not what must come next, or more than was granted.
        """
        theirs = self._by_peer[link.name]
        theirs.came_s = now_s
        layer, early = theirs.coming.get(number), theirs.early.get(number)
        if layer is not None:
            self._check(layer.key, layer.came_bytes, offset_bytes, piece)
            self._take(link, theirs, layer, piece, now_s)
        elif early is not None:
            self._check(early.opening.key, sum(map(len, early.parked)), offset_bytes, piece)
            self._park(link, theirs, early, piece)

    def _check(self, key: LayerKey, wanted_bytes: int, offset_bytes: int, piece: memoryview) -> None:
        if offset_bytes != wanted_bytes or not len(piece):
            raise Refusal(
                "malformed", f"{key}: {len(piece)} bytes came for place {offset_bytes}, the next is {wanted_bytes}"
            )

    def _park(self, link: LayerLink, theirs: _FromPeer, early: _EarlyLayer, piece: memoryview) -> None:
        parked = [one for other in theirs.early.values() for one in other.parked]
        over_bytes = sum(len(one) for one in parked) + len(piece) > self._limits.window_bytes
        if over_bytes or len(parked) >= self._max_pieces:
            del theirs.early[early.opening.number]
            over = f"{self._limits.window_bytes} bytes" if over_bytes else f"{self._max_pieces} pieces"
            detail = f"over {over} came before it was expected"
            self._refuse(link, early.opening.number, early.opening.key, "not expected", detail)
        early.parked.append(piece)

    def _take(self, link: LayerLink, theirs: _FromPeer, layer: ComingLayer, piece: memoryview, now_s: float) -> None:
        """Have a piece copied, whether it has just come or was parked.

        Raises:
            Refusal: it is more than the layer has, or than was granted, or one of too many small ones.
        """
        max_bytes = min(layer.layout.stream_bytes, layer.granted_bytes)
        if layer.came_bytes + len(piece) > max_bytes:
            self._give_up(link, theirs, layer, "oversized", f"more came than the {max_bytes} bytes that may")
        if layer.came_pieces - layer.copied_pieces >= self._max_pieces:
            self._give_up(link, theirs, layer, "oversized", f"its bytes came in over {self._max_pieces} pieces at once")
        theirs.came_s = now_s
        self.bytes_by_peer[link.name] += len(piece)
        self._copiers.put(layer, piece)

    def _give_up(self, link: LayerLink, theirs: _FromPeer, layer: ComingLayer, reason: str, detail: str) -> None:
        theirs.coming.pop(layer.number, None)
        if self.claim(layer):
            self._lost(link.name, layer.key, detail)
        self._refuse(link, layer.number, layer.key, reason, detail)

    def cancelled(self, link: LayerLink, number: int) -> None:
        """Take note that the sender gave a layer up."""
        theirs = self._by_peer[link.name]
        theirs.early.pop(number, None)
        layer = theirs.coming.pop(number, None)
        if layer is not None and self.claim(layer):
            self._lost(link.name, layer.key, f"{link.name} gave it up")

    def progressed(self, link: LayerLink | None, layer: ComingLayer) -> None:
        """Tell the sender what the copiers did."""
        theirs = self._by_peer.get(layer.peer)
        if theirs is None or link is None or theirs.coming.get(layer.number) is not layer:
            return
        if layer.whole:
            del theirs.coming[layer.number]
            self.whole_layers += 1
            tell(link, CONTROL, wire.encode_number(wire.DONE, layer.number))
        else:
            self._grant(link, layer)

    def _grant(self, link: LayerLink, layer: ComingLayer) -> None:
        layer.granted_bytes = layer.copied_bytes + self._limits.window_bytes
        tell(link, CONTROL, wire.encode_pair(wire.GRANT, layer.number, layer.granted_bytes))

    # Ends before their time.

    def link_lost(self, peer: str, reason: str) -> None:
        """Give up all that was wanted of a peer."""
        theirs = self._by_peer.pop(peer, _FromPeer())
        keys = [*theirs.expected, *(layer.key for layer in theirs.coming.values() if self.claim(layer))]
        for key in keys:
            self._lost(peer, key, reason)

    def overdue(self, now_s: float, links: Mapping[str, LayerLink]) -> None:
        """Give up all that is expected of a peer of which nothing has come for too long."""
        limit_s = self._limits.no_progress_s
        for peer, theirs in self._by_peer.items():
            late = [key for key, one in theirs.expected.items() if now_s - max(one.since_s, theirs.came_s) >= limit_s]
            for key in late:
                del theirs.expected[key]
                self._lost(peer, key, f"nothing came of it from {peer} within {limit_s:.3g} s")
            for number, early in list(theirs.early.items()):
                if now_s - early.came_s >= limit_s:
                    del theirs.early[number]
                    tell(links.get(peer), CONTROL, wire.encode_refused(number, f"not expected within {limit_s:.3g} s"))
            for number, layer in list(theirs.coming.items()):
                if now_s - theirs.came_s >= limit_s and not layer.whole:
                    del theirs.coming[number]
                    tell(links.get(peer), CONTROL, wire.encode_refused(number, f"nothing came for {limit_s:.3g} s"))
                    if self.claim(layer):
                        self._lost(peer, layer.key, f"nothing more came of it from {peer} within {limit_s:.3g} s")
