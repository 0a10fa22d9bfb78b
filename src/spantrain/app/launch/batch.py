"""Workers that another program starts when it has room: what it is told, and what it is asked again and again."""

import contextlib
import shlex
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from spantrain.app.launch.way import LaunchedWorkers, LaunchWay, WantedWorkers, joining
from spantrain.app.reporter import Reporter
from spantrain.config.files.text_files import make_private_folder, write_atomically
from spantrain.errors import UsageError, WorkerError
from spantrain.reach.machines import TOOL_S

_LOOK_S, _LEAVE_S = 3.0, 3.0
TOKEN_FILE = "token.env"
"""Where and with what workers join, as variables; for its owner's eyes alone."""


class BatchWorkers(LaunchedWorkers):
    """Workers of jobs, one for each site."""

    suffix: ClassVar[str] = ""
    """Of the file that is written for a site; of a folder nothing."""

    def __init__(self, wanted: WantedWorkers, way: LaunchWay, reporter: Reporter) -> None:
        super().__init__(wanted, way, reporter)
        self.folder = wanted.log_folder.parent.resolve() / "launch"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self, join: str, token: str) -> None:
        """Write where to join, submit all jobs, and look after them; only write it, if that is wanted."""
        self.wanted.log_folder.mkdir(parents=True, exist_ok=True)
        relay = next(iter(self.options.relays.values()), None)
        told = "".join(f"{name}={value}\n" for name, value in joining(join, token, relay).items())
        for folder in self.token_folders():
            make_private_folder(folder)
            write_atomically(folder / TOKEN_FILE, told, private=True)
        if self.way.only_writes:
            for site in self.wanted.by_site:
                self.reporter.note(f"Wrote {self.written(site)}; start it with: {shlex.join(self.submit_words(site))}")
            return
        for site in self.wanted.by_site:
            self.submit(site)
        self._thread.start()

    def close(self) -> None:
        """Take back all jobs; where to join is of no more use."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * TOOL_S)
        if self.way.only_writes:
            return
        deadline_s = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline_s and any(self.is_under_way(site) for site in self.wanted.by_site):
            time.sleep(_LEAVE_S / 10)
        for site in self.wanted.by_site:
            try:
                self.take_back(site)
            except (UsageError, WorkerError) as error:
                self.reporter.note(f"{site}: {error}")
        for folder in self.token_folders():
            (folder / TOKEN_FILE).unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            for site in self.wanted.by_site:
                with contextlib.suppress(UsageError, WorkerError):  # asked again
                    self.look(site)

    def token_folders(self) -> Sequence[Path]:
        """Return where jobs look for the file with the token."""
        return [self.folder]

    def written(self, site: str) -> Path:
        """Return what was written for a site."""
        return self.folder / f"{site}{self.suffix}"

    @abstractmethod
    def submit_words(self, site: str) -> list[str]:
        """Return the command that starts a site's job."""

    def submit(self, site: str) -> None:
        """Start a site's job; nothing, as below, where it is only written.

        Raises:
            UsageError, WorkerError: as `run_tool`.
        """

    def look(self, site: str) -> None:
        """Tell of what has become of a site's job.

        Raises:
            WorkerError: it cannot be asked.
        """

    def is_under_way(self, site: str) -> bool:
        """Whether a site's job will end by itself soon: the coordinator has told its workers to leave."""
        del site
        return False

    def take_back(self, site: str) -> None:
        """End a site's job.

        Raises:
            UsageError, WorkerError: as `run_tool`.
        """
