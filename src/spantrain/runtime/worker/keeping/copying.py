"""A copy of a stage's state, or some of it, goes to a device that is to keep it, beside the steps that are trained.

It is the state before one step, whenever its pieces are read: of what has not gone yet when that step's update is
about to be done, a copy is made first. Pieces are small, and let all other messages go first
(`transport.mailbox.outbox`). The keeper says what it lacks, hears how that looks, and then takes the bytes of
one tensor after another.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from spantrain.core.messages import AT_ANY_STEP, BACKGROUND, ControlKey
from spantrain.core.records import Record
from spantrain.devices.base import ComputeDevice
from spantrain.errors import ConfigError, ProtocolError
from spantrain.formats.tensor_bytes import raw_bytes
from spantrain.runtime.channels import MailboxMessages
from spantrain.runtime.checkpoint.holding import STATE, Holding, described, held_tensors, put_back, wanted_of
from spantrain.runtime.redistribution.exchange import HeldTensors
from spantrain.runtime.redistribution.transfer import dtype_of
from spantrain.runtime.words import packed_words, read_words
from spantrain.runtime.worker.switch import Held, read_held

PIECE_BYTES = 2**20
"""Of what goes beside steps, at once."""
_MOST_STATE = 16
"""Tensors of an optimizer for each parameter."""
KEPT = "kept"
"""What copies for the loss of a device have in the names of their messages."""


class _Lacks(Record):
    """Tensors that a keeper has not."""

    names: tuple[str, ...]


class CopyLink(Record):
    """Messages between a device and one that keeps a copy of its state, of no step, as one of the two has them."""

    carrier: MailboxMessages
    generation: int
    ward: str
    keeper: str
    what: str = KEPT

    def want(self, names: Collection[str]) -> None:
        """Say what the keeper lacks."""
        key = ControlKey(self.generation, AT_ANY_STEP, f"{self.what}-wanted:{self.keeper}")
        self.carrier.send_message(self.ward, key, (packed_words(_Lacks(names=tuple(sorted(names)))),))

    def wanted(self) -> tuple[str, ...] | None:
        """Return what the keeper lacks, once it has said so.

        Raises:
            ProtocolError: it has said something else.
        """
        found = self.carrier.try_take(AT_ANY_STEP, f"{self.what}-wanted:{self.keeper}")
        if found is None:
            return None
        return read_words(_Lacks, _only(found, self.keeper), self.keeper, "says what it lacks").names

    def give(self, number: int, piece: Tensor) -> bool:
        """Send a piece, if there is room."""
        key = ControlKey(self.generation, AT_ANY_STEP, f"{BACKGROUND}{self.what}-copy:{self.ward}:{number}")
        return self.carrier.try_send(self.keeper, key, (piece,)) is not None

    def take(self, number: int) -> Tensor | None:
        """Return a piece, if it has come."""
        found = self.carrier.try_take(AT_ANY_STEP, f"{BACKGROUND}{self.what}-copy:{self.ward}:{number}")
        return None if found is None else _only(found, self.ward)


Fetch = Callable[[Callable[[], Tensor]], Tensor]
"""Has a tensor made of what a device holds, for the host to read."""


def fetch_from(device: ComputeDevice) -> Fetch:
    """Return how tensors of a device are read, past what it does now."""
    return lambda made: device.fetch(lambda: (made(),), device.torch_device)[0]


class CopySender:
    """Gives one keeper what it lacks of this device's state, as that was before a step."""

    def __init__(self, link: CopyLink, holding: Holding, optimizer: Optimizer, fetch: Fetch) -> None:
        """`holding`: what is followed, whose tensors stay as they are until `before_update`; `fetch` has them read."""
        self._link, self._fetch = link, fetch
        self._holding = holding
        self._tensors = held_tensors(holding, optimizer, holding.parts)
        # Running statistics change before the others do.
        for name, value in holding.statistics.items():
            self._tensors[holding.stored_name(name)] = value.detach().clone(), holding.parts[name]
        self._left: deque[Tensor] | None = None
        """Bytes that have not gone; None: the keeper has not said what it lacks."""
        self._frozen = False
        self._piece: Tensor | None = None
        """That there was no room for."""
        self.given = 0
        """Pieces that have gone."""

    @property
    def is_done(self) -> bool:
        """Whether all is on its way."""
        return self._left is not None and not self._left and self._piece is None

    def go_on(self) -> None:
        """Send as much as there is room for.

        Raises:
            ProtocolError: the keeper sends something else than it should.
        """
        if self._left is None:
            names = self._link.wanted()
            if names is None:
                return
            self._begin(names)
        while not self.is_done:
            self._piece = self._next_piece() if self._piece is None else self._piece
            if not self._link.give(self.given, self._piece):
                return
            self._piece = None
            self.given += 1

    def before_update(self) -> None:
        """Copy what has not gone yet: its tensors are about to change."""
        if self._frozen or self.is_done:
            return
        self._frozen = True
        if self._left is None:
            self._tensors = {name: (self._copied(tensor), part) for name, (tensor, part) in self._tensors.items()}
        else:
            self._left = deque(self._copied(left) for left in self._left)

    def _begin(self, names: Sequence[str]) -> None:
        unknown = set(names) - self._holding.parts.keys()
        if unknown:
            raise ProtocolError(f"{self._link.keeper}: lacks {min(unknown)}, which is not here")
        stored = {self._holding.stored_name(name) for name in names}
        stored |= {name for name in self._tensors if name.startswith(STATE) and name.split("/", 2)[2] in names}
        given = {name: self._tensors[name] for name in sorted(stored)}
        if given:
            self._piece = packed_words(HeldTensors(device=self._link.ward, tensors=described(given)))
        self._left = deque(raw_bytes(tensor) for tensor, _ in given.values() if tensor.numel())
        self._tensors = {}

    def _next_piece(self) -> Tensor:
        assert self._left
        found, room = list[Tensor](), PIECE_BYTES
        while room and self._left:
            head = self._left.popleft()
            found.append(head[:room])
            room -= found[-1].numel()
            if found[-1].numel() < head.numel():
                self._left.appendleft(head[found[-1].numel() :])
        return self._fetch(lambda: torch.cat([part.cpu() for part in found]))

    def _copied(self, tensor: Tensor) -> Tensor:
        return self._fetch(lambda: tensor.detach().clone())


class CopyReceiver:
    """Has what a copy lacks come, of which the rest was here."""

    def __init__(self, link: CopyLink, holding: Holding, optimizer: Optimizer, held: Sequence[Held]) -> None:
        """Say what is lacking; `held`: what this device has of the same step."""
        self._link, self._holding, self._optimizer = link, holding, optimizer
        self._tensors: dict[str, Tensor] = {}
        found = {name: _owner(name, held) for name in holding.tensors}
        for name, own in found.items():
            if own is not None:
                tensors = held_tensors(own.holding, own.optimizer, [name])
                self._tensors |= {stored: tensor.cpu().clone() for stored, (tensor, _) in tensors.items()}
        self._lacking = [name for name, own in found.items() if own is None]
        self._left: deque[Tensor] | None = None
        """Room for the bytes that come; None: it is not known how they look."""
        self.taken = 0
        """Pieces that have come."""
        link.want(self._lacking)
        self.is_whole = not self._lacking
        if self.is_whole:
            put_back(holding, optimizer, self._tensors)

    def go_on(self) -> bool:
        """Take what has come; return whether the copy has become whole: of before the step in which it began.

        Raises:
            ProtocolError: something else has come.
        """
        while not self.is_whole and (piece := self._link.take(self.taken)) is not None:
            self.taken += 1
            if self._left is None:
                self._make_room(piece)
            else:
                self._fill(piece)
            if not self._left:
                put_back(self._holding, self._optimizer, self._tensors)
                self._tensors = {}
                self.is_whole = True
        return self.is_whole

    def _make_room(self, message: Tensor) -> None:
        ward = self._link.ward
        given = read_held(message, ward)
        part = self._holding.of(self._lacking)
        try:
            wanted = wanted_of(part, {ward: given})
        except ConfigError as error:
            raise ProtocolError(f"{ward}: what it gives to be kept is not what was asked for: {error}") from None
        if wanted.keys() != given.tensors.keys() or len(wanted) > (1 + _MOST_STATE) * len(self._lacking):
            raise ProtocolError(f"{ward}: gives other tensors to be kept than were asked for")
        most = {name: max(1, tensor.numel()) for name, tensor in part.tensors.items()}
        for name, own in given.tensors.items():
            plain = name.split("/", 2 if name.startswith(STATE) else 1)[-1]  # of what it belongs to, in the model
            if not own.part.is_whole or math.prod(own.part.full_shape) > most[plain]:
                raise ProtocolError(f"{ward}: gives {name} in shape {list(own.part.full_shape)} to be kept")
        arriving = {
            name: torch.empty(own.part.full_shape, dtype=dtype_of(own, name))
            for name, own in sorted(given.tensors.items())
        }
        self._tensors |= arriving
        self._left = deque(raw_bytes(tensor) for tensor in arriving.values() if tensor.numel())

    def _fill(self, piece: Tensor) -> None:
        while piece.numel() and self._left:
            head = self._left.popleft()
            size = min(head.numel(), piece.numel())
            head[:size] = piece[:size]
            piece = piece[size:]
            if size < head.numel():
                self._left.appendleft(head[size:])
        if piece.numel():
            raise ProtocolError(f"{self._link.ward}: sent {piece.numel()} bytes more to be kept than there are")


def _owner(name: str, held: Sequence[Held]) -> Held | None:
    """Return what has a tensor, and its optimizer state, whole."""
    able = (one for one in held if one.holding.own_rows is None and name in one.holding.parts)
    return next((one for one in able if one.holding.parts[name].is_whole), None)


def _only(tensors: tuple[Tensor, ...], sender: str) -> Tensor:
    if len(tensors) != 1 or tensors[0].dtype != torch.uint8:
        raise ProtocolError(f"{sender}: sent {len(tensors)} tensors where bytes were to come")
    return tensors[0]
