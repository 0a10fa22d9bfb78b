"""Layers of named parameters between shards and clusters, over ZeroMQ with CURVE: large frames, few copies.

Di-PS, 3.1. Kept: ZeroMQ for data beside gRPC for control, layers in a pipeline, memory that is used again, threads
that put what came in its place beside the network. Decided here: a layer is sent from where it lies, and copied once
where it arrives; only what was expected is taken in, checked by name, type and shape; the receiver says how far a layer
may go, so that memory is bounded at both ends; keys say names, and only admitted keys connect.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from spantrain.core.outer.events import Ticket
from spantrain.core.outer.layers import ParameterSpec
from spantrain.errors import ProtocolError
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.layers.arrivals import Arrivals
from spantrain.transport.layers.copiers import BufferPool, ComingLayer, Copiers, keep_freed_memory
from spantrain.transport.layers.departures import Departures, specs_of
from spantrain.transport.layers.format import Opening, encode_opening
from spantrain.transport.layers.interface import LayerCounters, LayerKey, LayerLimits, WireListener
from spantrain.transport.layers.loop import LayerLoop

_CLOSE_S = 30.0


class LayerTransport:
    """One side's end of the data plane: any number of layers in flight, to and from any number of peers."""

    def __init__(
        self, *, name: str, bind: str, keypair: KeyPair | None, listener: WireListener,
        limits: LayerLimits | None = None, pool: BufferPool | None = None,
    ) -> None:  # fmt: skip
        """Begin: `bind` is like `tcp://0.0.0.0:0`, or empty to only dial; without a key pair nothing is encrypted.

        Raises:
            OSError: the address cannot be had.
        """
        self._name, self._listener = name, listener
        self.public_key = keypair.public_key if keypair is not None else ""
        """What peers must know to trust this side; empty without encryption."""
        self._limits = limits or LayerLimits()
        keep_freed_memory()
        self._fault = ""
        self._loop = LayerLoop(name, bind, keypair, self._limits, self._died)
        self.endpoint = self._loop.endpoint
        """Where peers may dial; empty if they cannot."""
        window_bytes, frame_bytes = self._limits.window_bytes, self._limits.frame_bytes
        self._copiers = Copiers(
            self._limits.copiers, name=name, progressed=self._progressed, hand_over=self._hand_over,
            every_bytes=min(window_bytes // 4, window_bytes - frame_bytes + 1), died=self._died,
        )  # fmt: skip
        self._arrivals = Arrivals(self._limits, pool or BufferPool(), self._copiers, lost=listener.lost)
        self._departures = Departures(self._limits, sent=listener.sent, lost=listener.lost)
        self._loop.begin(self._arrivals, self._departures)

    def set_peers(self, peers: Iterable[PeerAddress]) -> None:
        """Replace the set of peers: those that listen are dialled, the others may dial; who is not in it is dropped.

        Raises:
            ProtocolError: the wire is closed.
        """
        wanted = tuple(peers)
        self._order(lambda: self._loop.set_peers(wanted))

    def expect(self, peer: str, key: LayerKey, parameters: Sequence[ParameterSpec]) -> None:
        """Take in this layer from this peer: exactly these parameters. It will be told of as arrived or lost.

        Raises:
            ValueError: it is larger than the limit.
            ProtocolError: the wire is closed.
        """
        wanted = tuple(parameters)
        self._check_size(key, sum(one.size_bytes for one in wanted))
        now_s = time.monotonic()
        self._order(lambda: self._expect(peer, key, wanted, now_s))

    def _expect(self, peer: str, key: LayerKey, wanted: tuple[ParameterSpec, ...], now_s: float) -> None:
        try:
            self._arrivals.expect(self._loop.links.get(peer), peer, key, wanted, now_s)
        except Refusal as refusal:  # what came before was not that
            self._loop.refused.refuse(refusal, peer)

    def send(self, peer: str, key: LayerKey, tensors: Mapping[str, Tensor]) -> None:
        """Queue a layer; layers to one peer go in the order of the calls. It will be told of as sent or lost.

        The tensors must not change until then.

        Raises:
            ValueError: it is larger than a limit, or a tensor is not on the CPU or of a type that cannot be sent.
            ProtocolError: the wire is closed.
        """
        layer = dict(tensors)
        specs = specs_of(layer)
        self._check_size(key, sum(one.size_bytes for one in specs))
        encode_opening(Opening(number=0, key=key, parameters=specs))  # in the wire's thread it would be too late
        now_s = time.monotonic()
        self._order(lambda: self._departures.send(self._loop.links.get(peer), peer, key, layer, now_s))

    def forget(self, ticket: Ticket) -> None:
        """Drop all of a push or a pull, waiting or on its way, here and at the other ends; it is not told of as lost.

        Raises:
            ProtocolError: the wire is closed.
        """
        self._order(lambda: self._forget(ticket))

    def counters(self) -> LayerCounters:
        """Return totals since the start."""
        return LayerCounters(
            layers_sent=self._departures.whole_layers,
            layers_received=self._arrivals.whole_layers,
            bytes_sent=dict(self._departures.bytes_by_peer),
            bytes_received=dict(self._arrivals.bytes_by_peer),
            refused=self._loop.refused.snapshot(),
        )

    def close(self) -> None:
        """Stop; what is on its way is lost and not told of. May be called twice, but not from the wire's threads."""
        self._loop.order(self._loop.stop)
        self._loop.join(_CLOSE_S)
        self._copiers.close()

    def _check_size(self, key: LayerKey, size_bytes: int) -> None:
        if size_bytes > self._limits.layer_bytes:
            raise ValueError(
                f"{self._name}: {key} has {size_bytes} bytes, at most {self._limits.layer_bytes} are allowed; make "
                "smaller layers, or raise layer_bytes at both ends"
            )

    def _order(self, order: Callable[[], None]) -> None:
        if self._loop.is_over or self._fault:
            raise ProtocolError(f"{self._name}: the layer wire is closed; {self._fault or 'make a new one'}")
        self._loop.order(order)

    def _forget(self, ticket: Ticket) -> None:
        links = self._loop.links
        self._arrivals.forget(ticket, links)
        self._departures.forget(ticket, links)

    # From the wire's own threads.

    def _died(self, fault: str) -> None:
        """End: without one of its threads, layers would only seem to be on their way."""
        self._fault = self._fault or fault
        self._loop.order(self._loop.stop)
        self._listener.died(fault)

    def _progressed(self, layer: ComingLayer) -> None:
        self._loop.order(lambda: self._arrivals.progressed(self._loop.links.get(layer.peer), layer))

    def _hand_over(self, layer: ComingLayer) -> None:
        if self._arrivals.claim(layer):
            self._listener.arrived(layer.peer, layer.key, layer.tensors())
