"""Carries out an exchange of tensors between devices: each says what it has, asks for what it lacks, gives and takes.

All devices of a group do it at the same time, in four rounds:

    have   to everybody: the names of the files (or whatever holds tensors) that are readable here; left out where each
           file is one device's memory, and so with its device
    want   to everybody: the blocks that this device takes from there, perhaps none
    give   what was asked for, in messages of a few MiB
    take   what this device asked for

Each device knows after `have` what every other one can give, and after `want` how many messages come and go, so the
end needs no word. What comes while a device still gives waits in its memory, at most what it asked for. Words are
JSON, packed, tensors raw bytes; both are checked against what the files are known to hold.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from spantrain.core.checkpoint import StoredTensor
from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.errors import ConfigError, ProtocolError
from spantrain.formats.tensor_bytes import raw_bytes
from spantrain.runtime.channels import DriverChannel
from spantrain.runtime.redistribution import exchange
from spantrain.runtime.words import packed_words, read_words

_CHUNK_BYTES = 4 * 2**20
_HAVE, _WANT, _GIVE = "exchange-have", "exchange-want", "exchange-give"

Request = Mapping[str, tuple[exchange.TensorBlock, ...]]
"""Blocks by file."""


class _Readable(Record):
    """What a device has."""

    files: tuple[str, ...]


class _Asked(Record):
    """What a device takes from another one."""

    blocks: Request


class TensorSource(Protocol):
    """Tensors that are readable here, in named files."""

    def present(self) -> tuple[str, ...]:
        """Return the names of the files that are readable here."""

    def read(self, name: str, blocks: Sequence[exchange.TensorBlock]) -> list[torch.Tensor]:
        """Return blocks of the unsplit model's tensors from one file, checked."""


class FilesBeyond(Record):
    """Files that no device of an exchange has."""

    names: Collection[str]
    fetch: Callable[[str], None]
    """Has one be readable here."""


class TensorExchange:
    """One device's part in an exchange."""

    def __init__(
        self, group: exchange.ExchangeGroup, files: Mapping[str, exchange.Described], source: TensorSource,
        post: DriverChannel | None, *, in_memory: bool = False, lanes: str = "", beyond: FilesBeyond | None = None,
    ) -> None:  # fmt: skip
        """Take part; `post` may be None where there are no peers. `in_memory`: files have the names of who has them;
        `lanes`: what distinguishes its messages from those of another exchange of the same step; `beyond`: files that
        any device can fetch, where nobody has them.
        """
        assert post is not None or not group.peers, "peers need a way to be reached"
        self._group = group
        self._files = files
        self._source = source
        self._post = post
        self._in_memory, self._lanes = in_memory, lanes
        self._beyond = beyond
        self._stored: dict[str, StoredTensor] = {
            name: stored for file in files.values() for name, stored in file.tensors.items()
        }
        self.taken_bytes = 0
        """Of what other devices gave."""

    def run(self, wanted: Mapping[str, TensorPart]) -> dict[str, torch.Tensor]:
        """Return the parts wanted, on the CPU, having given the others theirs.

        Raises:
            ConfigError: nobody has some of it; a file that is used is damaged.
            ProtocolError: a peer asks for what is not there, or sends another size than was asked for.
        """
        have = self._tell_what_is_here()
        requests, missing = self._divide(wanted, have)
        for peer in self._group.peers:
            self._send(peer, f"{_WANT}:{self._group.own}", packed_words(_Asked(blocks=requests.get(peer, {}))))
        if missing:
            raise ConfigError(self._nobody_has(missing, have))
        taken = {name: torch.empty(part.shape, dtype=self._dtype(name)) for name, part in wanted.items()}
        for file, blocks in self._messages(requests.get(self._group.own, {})):  # a little of it twice in memory
            self._fill(taken, wanted, blocks, self._source.read(file, blocks))
        for peer in self._group.peers:
            self._give(peer, self._request_of(peer))
        for peer in self._group.peers:
            self._take(peer, requests.get(peer, {}), wanted, taken)
        return taken

    def _dtype(self, tensor: str) -> torch.dtype:
        return dtype_of(self._stored[tensor], tensor)

    def _tell_what_is_here(self) -> dict[str, tuple[str, ...]]:
        """Tell the others; return who has what, the nearest first and this device before all."""
        own = self._source.present()
        if self._in_memory:
            return {self._group.own: own} | {name: (name,) for name in self._group.by_nearness() if name in self._files}
        for peer in self._group.peers:
            self._send(peer, f"{_HAVE}:{self._group.own}", packed_words(_Readable(files=own)))
        have = {self._group.own: own}
        for peer in self._group.by_nearness():
            files = read_words(_Readable, self._receive(f"{_HAVE}:{peer}"), peer, "says what it has").files
            have[peer] = tuple(name for name in files if name in self._files)
        return have if self._beyond is None else have | self._fetched(self._beyond, have)

    def _fetched(self, beyond: FilesBeyond, have: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Return what those have that fetch, by turns, files which nobody has; fetch this device's."""
        lacking = sorted({*beyond.names}.difference(*have.values()))
        devices, found = sorted(have), dict[str, tuple[str, ...]]()
        for number, name in enumerate(lacking):
            device = devices[number % len(devices)]
            found[device] = (*found.get(device, have[device]), name)
            if device == self._group.own:
                beyond.fetch(name)
        return found

    def _divide(
        self, wanted: Mapping[str, TensorPart], have: Mapping[str, tuple[str, ...]]
    ) -> tuple[Mapping[str, Request], tuple[exchange.TensorBlock, ...]]:
        """Return what is asked of whom (also of this device itself), and what nobody has."""
        holder: dict[str, str] = {}
        for device, names in have.items():
            for name in names:
                holder.setdefault(name, device)
        held = [
            (name, {tensor: stored.part for tensor, stored in self._files[name].tensors.items()}) for name in holder
        ]
        by_file, missing = exchange.plan_fetch(wanted, held)
        requests: dict[str, dict[str, tuple[exchange.TensorBlock, ...]]] = {}
        for name, blocks in by_file.items():
            requests.setdefault(holder[name], {})[name] = blocks
        return requests, missing

    def _nobody_has(self, missing: Sequence[exchange.TensorBlock], have: Mapping[str, tuple[str, ...]]) -> str:
        seen = {name for names in have.values() for name in names}
        absent = [f"{name} (device {file.device} wrote it)" for name, file in self._files.items() if name not in seen]
        where = f"not on any machine of this run: {', '.join(absent)}; copy it there" if absent else "no file holds it"
        return f"the checkpoint lacks {exchange.missing_text(missing)} for device {self._group.own}: {where}"

    def _request_of(self, peer: str) -> Request:
        """Return what a peer asks for, all of which must be here."""
        request = read_words(_Asked, self._receive(f"{_WANT}:{peer}"), peer, "asks for what it lacks").blocks
        here = self._source.present()
        for name, blocks in request.items():
            if name not in here:
                raise ProtocolError(f"{peer}: asks for {name}, which is not here")
            for block in blocks:
                stored = self._files[name].tensors.get(block.tensor)
                if stored is None or not _is_inside(block, stored.part):
                    raise ProtocolError(f"{peer}: asks for {block} of {name}, which does not hold it")
        return request

    def _messages(self, request: Request) -> Iterator[tuple[str, Sequence[exchange.TensorBlock]]]:
        """Yield what goes in each message that answers a request: a file, and blocks of it, the same on both sides."""
        for name, blocks in sorted(request.items()):  # words have it in an order of their own
            element_bytes = {block.tensor: self._dtype(block.tensor).itemsize for block in blocks}
            for group in exchange.chunks_of(blocks, element_bytes, _CHUNK_BYTES):
                yield name, group

    def _give(self, peer: str, request: Request) -> None:
        for number, (name, group) in enumerate(self._messages(request)):
            flat = torch.cat([raw_bytes(piece) for piece in self._source.read(name, group)])
            self._send(peer, f"{_GIVE}:{self._group.own}:{number}", flat)

    def _take(
        self, peer: str, request: Request, wanted: Mapping[str, TensorPart], taken: Mapping[str, torch.Tensor]
    ) -> None:
        for number, (_, group) in enumerate(self._messages(request)):
            flat = self._receive(f"{_GIVE}:{peer}:{number}")
            self.taken_bytes += flat.nbytes
            sizes = [block.elements * self._dtype(block.tensor).itemsize for block in group]
            if flat.dtype != torch.uint8 or flat.numel() != sum(sizes):
                raise ProtocolError(f"{peer}: sent {flat.numel()} of {flat.dtype}, wanted {sum(sizes)} bytes")
            values = [
                piece.clone().view(self._dtype(block.tensor)).reshape([span.size for span in block.box])
                for block, piece in zip(group, torch.split(flat, sizes), strict=True)
            ]
            self._fill(taken, wanted, group, values)

    @staticmethod
    def _fill(
        taken: Mapping[str, torch.Tensor],
        wanted: Mapping[str, TensorPart],
        blocks: Sequence[exchange.TensorBlock],
        values: Sequence[torch.Tensor],
    ) -> None:
        for block, value in zip(blocks, values, strict=True):
            taken[block.tensor][exchange.place_of(block.box, wanted[block.tensor])] = value

    def _send(self, peer: str, lane: str, tensor: torch.Tensor) -> None:
        assert self._post is not None
        self._post.send(peer, self._lanes + lane, tensor)

    def _receive(self, lane: str) -> torch.Tensor:
        assert self._post is not None
        return self._post.receive(self._lanes + lane)


def dtype_of(stored: StoredTensor, name: str) -> torch.dtype:
    """Return the type of a tensor of that name, as another device describes it.

    Raises:
        ProtocolError: it is none.
    """
    found = vars(torch).get(stored.dtype)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"{name}: {stored.dtype[:40]!r} is no type of numbers")
    return found


def _is_inside(block: exchange.TensorBlock, part: TensorPart) -> bool:
    """Whether a box lies within one range of a part."""
    return any(
        len(box) == len(block.box) and all(outer.contains(span) for outer, span in zip(box, block.box, strict=True))
        for box in exchange.boxes_of(part)
    )
