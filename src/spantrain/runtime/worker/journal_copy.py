"""A worker's copy of the run's journal, where its machine is to take the coordinator's place if that is lost."""

import logging
import threading
from contextlib import suppress
from pathlib import Path

from spantrain.config.files.text_files import locked_file, make_private_folder, write_atomically
from spantrain.errors import Interrupted, SpanTrainError
from spantrain.runtime.checkpoint.manifest import MANIFEST_FILE, MARKER, write_marker
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.checkpoint.tensor_file import Disk, step_folder
from spantrain.runtime.control import data_requests
from spantrain.runtime.control.plane import ControlPlane

_END_S = 5.0
_AGAIN_S = 0.25
"""Before it is asked again after an order was ended."""
_log = logging.getLogger(__name__)


class JournalCopy:
    """Keeps the copy in a thread of its own, as long as the coordinator lives; it goes when the run ends properly."""

    def __init__(self, control: ControlPlane, run: Path) -> None:
        """Keep it in a run's folder here."""
        self.control = control
        self._run, self._folder, self._checkpoints = run, run / data_requests.JOURNAL_FOLDER, run / CHECKPOINTS
        self._closed = threading.Event()
        self._saved: Path | None = None
        """The checkpoint whose manifest is here."""
        self._manifests = 0
        """How many were complete with it."""
        self._thread = threading.Thread(target=self._keep, name="journal copy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, once the coordinator is lost; the copy stays."""
        self._closed.set()
        self._thread.join(_END_S)

    def remove(self) -> None:
        """End, and remove the copy: no run is to be gone on with."""
        self._closed.set()
        for name in (data_requests.JOURNAL_FILE, data_requests.CREDENTIALS_FILE):
            (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # something of others is in it
            self._folder.rmdir()
        (self._checkpoints / MARKER).unlink(missing_ok=True)
        self._forget(self._saved)

    def _keep(self) -> None:
        try:
            make_private_folder(self._folder)
            with locked_file(self._folder / data_requests.JOURNAL_FILE) as journal:
                journal.truncate(journal.seek(0))  # where it is, too: an older copy of this or another run may be there
                while not self._closed.is_set():
                    answer = self._next(journal.tell())
                    if answer is None:
                        continue
                    if answer.ended:
                        self.remove()
                        return
                    if answer.credentials:
                        write_atomically(
                            self._folder / data_requests.CREDENTIALS_FILE, answer.credentials, private=True
                        )
                    if answer.manifest:
                        self._keep_manifest(answer)
                    journal.write(answer.piece)
                    journal.flush()
        except BlockingIOError:
            _log.warning("%s: another program writes the journal there; no copy of it is kept", self._folder)
        except (OSError, SpanTrainError) as error:  # the coordinator is lost: the copy stays
            _log.warning("%s: the copy of the journal ends: %s", self._folder, error)

    def _keep_manifest(self, told: data_requests.JournalPiece) -> None:
        """Have the newest checkpoint be one of the run's folder here; its files lie where devices have written them."""
        before, folder = self._saved, step_folder(self._checkpoints, told.manifest_step)
        write_atomically(folder / MANIFEST_FILE, told.manifest)
        write_marker(Disk(), folder)
        self._saved, self._manifests = folder, told.manifests
        if before != folder:
            self._forget(before)

    def _forget(self, folder: Path | None) -> None:
        if folder is None:
            return
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # files of this device are in it
            folder.rmdir()

    def _next(self, offset: int) -> data_requests.JournalPiece | None:
        try:
            said = data_requests.FollowJournal(offset=offset, manifests=self._manifests, folder=str(self._run))
            return self.control.ask(said)
        except Interrupted:  # an order has ended, and no run
            self._closed.wait(_AGAIN_S)
            return None
