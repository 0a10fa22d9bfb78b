"""Layers that go: opened in the order of the calls, poured as far as the other side grants, done when it has all."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spantrain.core.outer.events import Ticket
from spantrain.core.outer.layers import LAYER_TYPES, ParameterSpec
from spantrain.formats.tensor_bytes import byte_view, dtype_name
from spantrain.transport.layers import format as wire
from spantrain.transport.layers.interface import LAYERS, LayerKey, LayerLimits, LayerLink, tell

_SMALL_BYTES = 65536
"""Parameters up to this size are put together; larger ones go from where they are."""


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[ParameterSpec, ...]:
    """Describe tensors that are to be sent.

    Raises:
        ValueError: one has a type or a place that cannot be sent, or is empty.
    """
    wrong = [
        f"{name}: {tensor.dtype} on {tensor.device}"
        for name, tensor in tensors.items()
        if dtype_name(tensor.dtype) not in LAYER_TYPES or tensor.device.type != "cpu"
    ]
    if wrong or not tensors:
        raise ValueError(
            f"a layer needs tensors of {', '.join(LAYER_TYPES)} on the CPU, got {'; '.join(wrong) or 'none'}; "
            "copy them there first"
        )
    return tuple(
        ParameterSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
        for name, tensor in tensors.items()
    )


def pieces(tensors: Sequence[Tensor], most_bytes: int) -> Iterator["memoryview | bytes"]:
    """Yield the bytes of tensors, one after the other; only of small ones is a copy made.

    >>> import torch
    >>> [len(piece) for piece in pieces([torch.zeros(3), torch.zeros(5), torch.zeros(50_000)], 131072)]
    [32, 131072, 68928]
    """
    small = bytearray()
    for tensor in tensors:
        view = byte_view(tensor)
        if small and (len(view) > _SMALL_BYTES or len(small) + len(view) > most_bytes):
            yield bytes(small)
            small = bytearray()
        if len(view) > _SMALL_BYTES:
            yield from (view[begin : begin + most_bytes] for begin in range(0, len(view), most_bytes))
        else:
            small += view
    if small:
        yield bytes(small)


@dataclass(eq=False)
class GoingLayer:
    """A layer on its way to a peer."""

    key: LayerKey
    parameters: tuple[ParameterSpec, ...]
    tensors: Sequence[Tensor]
    moved_s: float
    """When it last came on."""
    number: int = -1
    left: "Iterator[memoryview | bytes]" = field(default_factory=lambda: iter(()))
    ahead: "memoryview | bytes | None" = None
    """The next piece, for which there was no room."""
    poured_bytes: int = 0
    granted_bytes: int | None = None
    """How far it may go; None until the other side has said that it expects it."""


@dataclass(eq=False)
class _ToPeer:
    """What goes to one peer."""

    waiting: deque[GoingLayer] = field(default_factory=deque)
    """For the link to be up, or for those before it."""
    going: dict[int, GoingLayer] = field(default_factory=dict)
    early_bytes: int = 0
    """Poured of layers that nothing was granted of."""
    next_number: int = 0


class Departures:
    """All that goes; owned by the thread of the sockets."""

    def __init__(
        self, limits: LayerLimits, *, sent: Callable[[str, LayerKey], None], lost: Callable[[str, LayerKey, str], None]
    ) -> None:
        self._limits = limits
        self._sent, self._lost = sent, lost
        self._by_peer: defaultdict[str, _ToPeer] = defaultdict(_ToPeer)
        self.whole_layers = 0
        self.bytes_by_peer: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        """Whether something is on its way, or waits."""
        return any(theirs.waiting or theirs.going for theirs in self._by_peer.values())

    def send(
        self, link: LayerLink | None, peer: str, key: LayerKey, tensors: Mapping[str, Tensor], now_s: float
    ) -> None:
        """Put a layer in line, and pour what can be."""
        layer = GoingLayer(key, specs_of(tensors), tuple(tensors.values()), now_s)
        self._by_peer[peer].waiting.append(layer)
        if link is not None and link.up:
            self.flush(link, now_s)

    def flush(self, link: LayerLink, now_s: float) -> None:
        """Pour all that may go to a peer now."""
        theirs = self._by_peer[link.name]
        for layer in list(theirs.going.values()):
            self._pour(link, theirs, layer, now_s)
        while theirs.waiting and theirs.early_bytes < link.state.window_bytes:
            layer = theirs.waiting.popleft()
            self._open(link, theirs, layer)
            self._pour(link, theirs, layer, now_s)

    def _open(self, link: LayerLink, theirs: _ToPeer, layer: GoingLayer) -> None:
        layer.number, theirs.next_number = theirs.next_number, theirs.next_number + 1
        layer.left = pieces(layer.tensors, link.state.frame_bytes)
        theirs.going[layer.number] = layer
        opening = wire.Opening(number=layer.number, key=layer.key, parameters=layer.parameters)
        tell(link, LAYERS, wire.encode_opening(opening))

    def _pour(self, link: LayerLink, theirs: _ToPeer, layer: GoingLayer, now_s: float) -> None:
        while True:
            piece = layer.ahead if layer.ahead is not None else next(layer.left, None)
            layer.ahead = piece
            if layer.granted_bytes is None:
                room_bytes = link.state.window_bytes - theirs.early_bytes
            else:
                room_bytes = layer.granted_bytes - layer.poured_bytes
            if piece is None or len(piece) > room_bytes:
                return
            tell(link, LAYERS, wire.encode_pair(wire.DATA, layer.number, layer.poured_bytes), piece)
            layer.ahead, layer.moved_s = None, now_s
            layer.poured_bytes += len(piece)
            theirs.early_bytes += len(piece) if layer.granted_bytes is None else 0
            self.bytes_by_peer[link.name] += len(piece)

    # What the other side says of them; what it says of others is old.

    def granted(self, link: LayerLink, number: int, upto_bytes: int, now_s: float) -> None:
        """Let a layer go as far as the other side says."""
        theirs = self._by_peer[link.name]
        layer = theirs.going.get(number)
        if layer is None:
            return
        if layer.granted_bytes is None:
            theirs.early_bytes -= layer.poured_bytes
        layer.granted_bytes, layer.moved_s = upto_bytes, now_s
        self.flush(link, now_s)

    def done(self, link: LayerLink, number: int, now_s: float) -> None:
        """Take note that the other side has all of a layer."""
        layer = self._take_out(link.name, number)
        if layer is not None:
            self.whole_layers += 1
            self._sent(link.name, layer.key)
            self.flush(link, now_s)

    def refused(self, link: LayerLink, number: int, reason: str, now_s: float) -> None:
        """Take note that the other side will not have a layer."""
        layer = self._take_out(link.name, number)
        if layer is not None:
            tell(link, LAYERS, wire.encode_number(wire.CANCEL, number))
            self._lost(link.name, layer.key, f"{link.name} refused it: {reason}")
            self.flush(link, now_s)

    def _take_out(self, peer: str, number: int) -> GoingLayer | None:
        theirs = self._by_peer[peer]
        layer = theirs.going.pop(number, None)
        if layer is not None and layer.granted_bytes is None:
            theirs.early_bytes -= layer.poured_bytes
        return layer

    # Ends before their time.

    def forget(self, ticket: Ticket, links: Mapping[str, LayerLink]) -> None:
        """Drop all of a push or a pull, and tell the other sides."""
        for peer, theirs in self._by_peer.items():
            theirs.waiting = deque(layer for layer in theirs.waiting if layer.key.ticket != ticket)
            for layer in [one for one in theirs.going.values() if one.key.ticket == ticket]:
                self._take_out(peer, layer.number)
                tell(links.get(peer), LAYERS, wire.encode_number(wire.CANCEL, layer.number))

    def link_lost(self, peer: str, reason: str) -> None:
        """Give up all that was for a peer."""
        theirs = self._by_peer.pop(peer, _ToPeer())
        for layer in [*theirs.going.values(), *theirs.waiting]:
            self._lost(peer, layer.key, reason)

    def overdue(self, now_s: float, links: Mapping[str, LayerLink]) -> None:
        """Give up what has not come on for too long; a layer that waits for others does so no longer than they."""
        limit_s = self._limits.no_progress_s
        for peer, theirs in self._by_peer.items():
            moved_s = max((layer.moved_s for layer in theirs.going.values()), default=0.0)
            for layer in [*theirs.going.values(), *theirs.waiting]:
                if now_s - max(layer.moved_s, moved_s) < limit_s:
                    continue
                link = links.get(peer)
                if layer.number in theirs.going:
                    self._take_out(peer, layer.number)
                    tell(link, LAYERS, wire.encode_number(wire.CANCEL, layer.number))
                else:
                    theirs.waiting.remove(layer)
                stands = "it takes nothing" if link is not None and link.up else "it is not connected"
                self._lost(peer, layer.key, f"{peer} did not take it within {limit_s:.3g} s: {stands}")
