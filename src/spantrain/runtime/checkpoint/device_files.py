"""A device's end of files that the coordinator's machine is to have, or has alone (`coordinator_files`)."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from spantrain.core.checkpoint import StoredFile
from spantrain.errors import ConfigError, SpanTrainError, WorkerError
from spantrain.runtime.checkpoint.tensor_file import Disk, TensorFiles
from spantrain.runtime.control.data_requests import PIECE_BYTES, FetchPiece, OfferFile, PutPiece
from spantrain.runtime.control.orders import BringOrder
from spantrain.runtime.control.plane import ControlPlane
from spantrain.runtime.control.requests import Progress

_REST = 3.0
"""How many times as long as a piece takes a device waits for the next one while it trains: links are the steps'."""
_ASK_AGAIN_S = 1.0
"""Before a file is offered again while those of another checkpoint come from other devices."""
_SAY_S = 0.5
"""Between two words about how far a file is."""
FETCHED = ".fetched"
"""The end of a name that a file has as long as it is needed to begin with."""


def bring(
    control: ControlPlane, path: Path, step: int, *, rest: Callable[[float], bool] = lambda _took_s: False,
    on_progress: Callable[[int], None] = lambda _done_bytes: None,
) -> int | None:  # fmt: skip
    """Bring a file that this device has saved after so many steps to the coordinator's machine, if it lacks that.

    Args:
        control: reaches the coordinator.
        path: where the file lies here.
        step: of its checkpoint.
        rest: is told how long each piece took, and returns whether to end.
        on_progress: hears how much of it has come.

    Returns:
        The checkpoint whose files come now, if it was offered too early.

    Raises:
        OSError: it cannot be read.
        SpanTrainError: the coordinator refuses, or is lost, or has ended the order.
    """
    answer = control.ask(OfferFile(step=step, name=path.name))
    if not answer.wanted:
        return answer.step
    offset = 0
    with path.open("rb") as content:
        while piece := content.read(PIECE_BYTES):
            begun_s = time.monotonic()
            put = PutPiece(step=step, name=path.name, offset=offset, piece=piece)
            if not control.ask(put).wanted:
                break
            offset += len(piece)
            on_progress(offset)
            if rest(time.monotonic() - begun_s):
                break
    return None


def bring_all(order: BringOrder, folder: Path, control: ControlPlane) -> None:
    """Bring files of a checkpoint's folder, and say now and then how much has come.

    Raises:
        WorkerError: one is not here, or cannot be read.
        RemoteRefusal, PeerLostError, Interrupted: as of `ControlPlane.ask`.
    """
    said_s = 0.0

    def say(before_bytes: int, done_bytes: int) -> None:
        nonlocal said_s
        if time.monotonic() > said_s + _SAY_S:
            said_s = time.monotonic()
            control.ask(Progress(done=before_bytes + done_bytes, total=sum(sizes), text=""))

    try:
        sizes = [(folder / name).stat().st_size for name in order.names]
        for number, name in enumerate(order.names):
            bring(control, folder / name, order.step, on_progress=partial(say, sum(sizes[:number])))
    except OSError as error:
        raise WorkerError(f"{folder}: what was saved there cannot be read: {error}") from None


class FileSender:
    """Brings what this device has saved to the coordinator's machine beside the steps, where it is wanted there.

    That takes a quarter of what the way carries. Whatever hinders it ends that, and no run.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._held: dict[int, Path] = {}
        """What has not been brought, by steps."""
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def offer(self, path: Path, step: int) -> None:
        """Have a file be brought, if it is wanted: when all files of the checkpoint that comes now are there."""
        with self._lock:
            self._held[step] = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._bring_held, name="file sender", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Give up what is being brought."""
        self._ended.set()

    def _bring_held(self) -> None:
        wanted_step: int | None = None
        while (step := self._next(wanted_step)) is not None:
            try:
                wanted_step = self._bring(step)
            except SpanTrainError:
                wanted_step = None
            if wanted_step is None:
                self._forget(step)
            elif wanted_step not in self._held:
                self._ended.wait(_ASK_AGAIN_S)

    def _bring(self, step: int) -> int | None:
        path = self._held[step]
        try:
            return bring(self._control, path, step, rest=lambda took_s: self._ended.wait(_REST * took_s))
        except OSError:
            self._control.ask(OfferFile(step=step, name=path.name, is_gone=True))
            return None

    def _next(self, wanted_step: int | None) -> int | None:
        """Return what to offer: the checkpoint that is wanted, else the newest; None: no more."""
        with self._lock:
            if self._ended.is_set() or not self._held:
                self._thread = None
                return None
            return wanted_step if wanted_step in self._held else max(self._held)

    def _forget(self, step: int) -> None:
        """Keep what was saved later alone."""
        with self._lock:
            self._held = {later: path for later, path in self._held.items() if later > step}


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
        self.at_coordinator: Sequence[str] = tuple(at_coordinator)
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
