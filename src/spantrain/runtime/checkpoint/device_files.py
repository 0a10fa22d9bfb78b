"""A device's end of files that the coordinator's machine is to have, or has alone (`coordinator_files`)."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from spantrain.core.checkpoint import StoredFile
from spantrain.errors import ConfigError, SpanTrainError
from spantrain.runtime.checkpoint.tensor_file import Disk, TensorFiles
from spantrain.runtime.control.file_requests import PIECE_BYTES, FetchPiece, OfferFile, PutPiece
from spantrain.runtime.control.plane import ControlPlane

_REST = 3.0
"""How many times as long as a piece takes a device waits for the next one while it trains: links are the steps'."""


FETCHED = ".fetched"
"""The end of a name that a file has as long as it is needed to begin with."""


class FileSender:
    """Brings what this device has saved to the coordinator's machine, where it is wanted there.

    While steps go on that takes a quarter of what the way carries. Whatever hinders it ends that, and no run.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        """Of the thread that sends."""
        self._hurry = threading.Event()
        self._newest: tuple[Path, int] | None = None

    def offer(self, path: Path, step: int) -> None:
        """Have a file be brought, if it is wanted; in any thread, one after the other."""
        self._newest = path, step
        self._begin(path, step, last=False)

    def finish(self) -> None:
        """Bring the newest one at once, and return when that is done, or not wanted."""
        self._hurry.set()
        if self._newest is not None:
            self._begin(*self._newest, last=True)
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """Give up what is being brought."""
        self._stop.set()
        self._hurry.set()

    def _begin(self, path: Path, step: int, *, last: bool) -> None:
        if self._thread is not None and self._thread.is_alive() and self._thread.name == path.name:
            return
        with suppress(SpanTrainError):
            if not self._control.ask(OfferFile(step=step, name=path.name, last=last)).wanted:
                return
            self._stop.set()
            self._stop = threading.Event()
            arguments = path, step, self._stop
            self._thread = threading.Thread(target=self._send, args=arguments, name=path.name, daemon=True)
            self._thread.start()

    def _send(self, path: Path, step: int, stop: threading.Event) -> None:
        offset = 0
        with suppress(OSError, SpanTrainError), path.open("rb") as content:
            while piece := content.read(PIECE_BYTES):
                begun_s = time.monotonic()
                put = PutPiece(step=step, name=path.name, offset=offset, piece=piece)
                if stop.is_set() or not self._control.ask(put).wanted:
                    return
                offset += len(piece)
                if not self._hurry.is_set():
                    self._hurry.wait(_REST * (time.monotonic() - begun_s))


class FilesToBeginWith(TensorFiles):
    """The files of a checkpoint that lie here, and those that the coordinator's machine has alone, once fetched."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, StoredFile],
        at_coordinator: Sequence[str] = (),
        control: ControlPlane | None = None,
    ) -> None:
        """Read files of a checkpoint's folder; `control` reaches the coordinator, whose machine has some of them."""
        super().__init__(folder, files)
        self.at_coordinator = tuple(at_coordinator)
        self._control, self._storage = control, Disk()

    def fetch(self, name: str) -> None:
        """Have a file here from the coordinator, until `forget`.

        Raises:
            RemoteRefusal: it cannot give it.
            ConfigError: it cannot be written here, or is not what the manifest says.
        """
        assert self._control is not None, f"nobody has said where {name} is"
        path = self.folder / f".{name}{FETCHED}"
        try:
            self._storage.make_folder(self.folder)
            with self._storage.create(path) as stream:
                self.elsewhere[name] = path
                while piece := self._control.ask(FetchPiece(name=name, offset=stream.tell())).piece:
                    stream.write(piece)
                    if stream.tell() > self.files[name].size_bytes:
                        break
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error}") from None
        self.check(name)

    def forget(self) -> None:
        """Remove what was fetched."""
        for path in self.elsewhere.values():
            self._storage.remove(path)
        self.elsewhere.clear()
