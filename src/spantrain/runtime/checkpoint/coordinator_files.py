"""Files of checkpoints on the coordinator's machine: those of other machines come to it, those that it has go out.

Each device writes on its own machine. So that a lost machine costs no checkpoint, and the trained model lies in one
place, what the coordinator's disk lacks is brought there beside the steps: all files of one checkpoint, then those of
the newest, so that one is whole here sooner or later however many are written meanwhile. Where all write to one disk
nothing is brought.
"""

import hashlib
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from spantrain.core.checkpoint import StoredFile
from spantrain.core.quantities import format_bytes
from spantrain.errors import ProtocolError
from spantrain.runtime.checkpoint.tensor_file import PARTIAL, Disk, step_folder
from spantrain.runtime.control.data_requests import (
    PIECE_BYTES,
    FetchPiece,
    FilePiece,
    FileWanted,
    NotSaved,
    OfferFile,
    PutPiece,
)
from spantrain.runtime.control.requests import SavedFile
from spantrain.transport.connection.bounds import printable
from spantrain.transport.control.protocol import RemoteRefusal

_STEPS_KNOWN = 4
"""Of so many checkpoints, the newest, it is known what devices have saved."""
_SPARE_BYTES = 2**28
"""What stays free on the disk."""


@dataclass(kw_only=True)
class _ComingFile:
    """A file that is being brought; its lock is held while something of it is written."""

    stored: StoredFile
    partial: Path
    stream: BinaryIO
    digest: Any = field(default_factory=hashlib.sha256)
    came_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class CoordinatorFiles:
    """The coordinator's end. Safe from any thread."""

    def __init__(
        self, checkpoints: Path, *, takes: bool, tell: Callable[[str], None],
        on_saved: Callable[[SavedFile], Sequence[int]] = lambda _saved: (),
        on_not_saved: Callable[[str, int], None] = lambda _device, _step: None,
        begins_with: Mapping[str, Path] = MappingProxyType({}), devices: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Take files below a folder, and give those that the run begins with.

        Args:
            checkpoints: where the folders of all steps lie.
            takes: whether files are to be brought.
            tell: hears what a person should know, in any thread.
            on_saved: hears of each file that a device has saved, in the thread of that device's call, and returns the
                steps whose checkpoints are not kept any longer.
            on_not_saved: hears which device has no room on its disk, after which step, in any thread.
            begins_with: the files of the checkpoint that the run begins with, by name.
            devices: that save: a checkpoint is whole here with the files of all of them.
        """
        self._checkpoints, self._takes, self._tell, self._on_saved = checkpoints, takes, tell, on_saved
        self._on_not_saved, self._begins_with, self._devices = on_not_saved, begins_with, frozenset(devices)
        self._storage = Disk()
        self._lock = threading.Lock()
        self._saved: dict[int, dict[str, StoredFile]] = {}
        """What devices have saved, by steps and name."""
        self._coming: dict[str, _ComingFile] = {}
        self.step: int | None = None
        """The checkpoint whose files come, or have come last."""
        self._given_up_step = -1
        """Of checkpoints up to this one nothing is wanted any longer."""
        self.taken_bytes = 0
        """Of files that have come whole."""

    @property
    def is_busy(self) -> bool:
        """Whether something is being brought."""
        return bool(self._coming)

    def saved(self, saved: SavedFile) -> Sequence[int]:
        """Note what a device has on its disk; return the steps whose checkpoints are not kept any longer."""
        self.expect(saved.step, {saved.name: saved.file})
        return self._on_saved(saved)

    def expect(self, step: int, files: Mapping[str, StoredFile]) -> None:
        """Note what devices have on their disks of a checkpoint."""
        with self._lock:
            self._saved.setdefault(step, {}).update(files)
            for old in sorted(self._saved)[:-_STEPS_KNOWN]:
                if old != self.step:
                    del self._saved[old]

    def answer(self, device: str, request: OfferFile | NotSaved | PutPiece | FetchPiece) -> FileWanted | FilePiece:
        """Answer a device.

        Raises:
            RemoteRefusal: it has saved no such file, or there is none.
            ProtocolError: it brings something else than it has said.
        """
        match request:
            case OfferFile():
                return self._wants(self._known(device, request), request)
            case NotSaved():
                self._note_full(device, request)
                return FileWanted(wanted=False)
            case PutPiece():
                self._known(device, request)
                return FileWanted(wanted=self._put(request))
            case FetchPiece(name=name, offset=offset):
                if name not in self._begins_with or offset < 0:
                    raise RemoteRefusal(f"the run begins with no file {name[:200]}")
                return FilePiece(piece=_read(self._begins_with[name], offset))

    def _note_full(self, device: str, told: NotSaved) -> None:
        """Tell of a device whose disk is full; have nothing come of a checkpoint that may never be whole."""
        self._tell(
            f"{device} has no room for its part of the checkpoint after {told.step} steps ({printable(told.why)}): "
            "free some, and it is written yet, until the next one is due; training goes on"
        )
        with self._lock:
            self._give_up_step(told.step)
            self._given_up_step = max(self._given_up_step, told.step)
        self._on_not_saved(device, told.step)

    def close(self) -> None:
        """Give up what has not come whole."""
        with self._lock:
            self._takes = False
            self._drop_all()

    def _known(self, device: str, request: OfferFile | PutPiece) -> StoredFile:
        with self._lock:
            stored = self._saved.get(request.step, {}).get(request.name)
        if stored is None or stored.device != device:
            raise RemoteRefusal(f"device {device} has saved no {request.name[:200]} after {request.step} steps")
        return stored

    def _wants(self, stored: StoredFile, offer: OfferFile) -> FileWanted:
        unwanted = FileWanted(wanted=False)
        with self._lock:
            if offer.is_gone:
                self._give_up_step(offer.step)
            first_step = self._given_up_step + 1 if self.step is None else self.step
            if not self._takes or offer.step < first_step or self._is_here(offer.step, offer.name):
                return unwanted
            for name in [name for name, one in self._coming.items() if one.stored.device == stored.device]:
                self._drop(name)  # a device brings one at a time: it begins again
            if self.step is not None and offer.step > self.step and not self._is_whole(self.step):
                return FileWanted(wanted=False, step=self.step)
            try:
                self._coming[offer.name] = self._begin(stored, offer)
            except OSError as error:
                self._give_up(error)
                return unwanted
            self.step = offer.step
            return FileWanted(wanted=True)

    def _begin(self, stored: StoredFile, offer: OfferFile) -> _ComingFile:
        folder = step_folder(self._checkpoints, offer.step)
        self._storage.make_folder(folder)
        left_bytes = sum(one.stored.size_bytes - one.came_bytes for one in self._coming.values())
        if shutil.disk_usage(folder).free < stored.size_bytes + left_bytes + _SPARE_BYTES:
            raise OSError(f"no room for {format_bytes(stored.size_bytes)}")
        partial = folder / f".{offer.name}{PARTIAL}"
        return _ComingFile(stored=stored, partial=partial, stream=self._storage.create(partial))

    def _is_here(self, step: int, name: str) -> bool:
        return (step_folder(self._checkpoints, step) / name).is_file()

    def _is_whole(self, step: int) -> bool:
        here = {file.device for name, file in self._saved.get(step, {}).items() if self._is_here(step, name)}
        return here >= self._devices

    def _put(self, put: PutPiece) -> bool:
        with self._lock:
            coming = self._coming.get(put.name) if put.step == self.step else None
        if coming is None:
            return False
        with coming.lock:
            end_bytes, is_piece = put.offset + len(put.piece), 0 < len(put.piece) <= PIECE_BYTES
            if is_piece and end_bytes == coming.came_bytes:
                return True  # asked again: the answer was lost on its way
            if put.offset != coming.came_bytes or not is_piece:
                raise ProtocolError(f"{put.name}: {len(put.piece)} bytes came for place {put.offset}")
            if end_bytes > coming.stored.size_bytes:
                raise ProtocolError(f"{put.name}: {end_bytes} bytes came of {coming.stored.size_bytes}")
            try:
                self._storage.append(coming.stream, put.piece)
                coming.digest.update(put.piece)
                coming.came_bytes = end_bytes
                if end_bytes == coming.stored.size_bytes:
                    self._end(put.name, coming)
            except (FileNotFoundError, ValueError):  # its checkpoint is not kept any longer, or its stream was closed
                return False
            except OSError as error:
                with self._lock:
                    self._give_up(error)
                return False
        return end_bytes < coming.stored.size_bytes

    def _end(self, name: str, coming: _ComingFile) -> None:
        self._storage.sync(coming.stream)
        with self._lock:
            if self._coming.pop(name, None) is None:
                return
            if coming.digest.hexdigest() != coming.stored.sha256:
                self._storage.remove(coming.partial)
                self._give_up_step(self.step)
                raise ProtocolError(f"{name}: came with another SHA-256 than device {coming.stored.device} has said")
            self._storage.rename(coming.partial, coming.partial.parent / name)
            self._storage.sync_folder(coming.partial.parent)
            self.taken_bytes += coming.stored.size_bytes

    def _give_up(self, error: Exception) -> None:
        if self._takes:
            self._tell(
                f"{self._checkpoints}: files of other machines cannot be taken here: {error}; they stay where they are"
            )
        self._takes = False
        self._drop_all()

    def _give_up_step(self, step: int | None) -> None:
        """Have the files of another checkpoint come, if those of this one do: one of them never will."""
        if step is not None and step == self.step:
            self._given_up_step, self.step = step, None
            self._drop_all()

    def _drop_all(self) -> None:
        for name in list(self._coming):
            self._drop(name)

    def _drop(self, name: str) -> None:
        coming = self._coming.pop(name)
        with suppress(OSError):
            coming.stream.close()
            self._storage.remove(coming.partial)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as content:
            content.seek(offset)
            return content.read(PIECE_BYTES)
    except OSError as error:
        raise RemoteRefusal(f"{path.name}: cannot be read on the coordinator's machine ({error.strerror})") from None
