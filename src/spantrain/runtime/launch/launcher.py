"""Starts the workers of one machine, and notices when one of them ends; free of torch."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from spantrain.core.records import Record
from spantrain.errors import WorkerError
from spantrain.reach.machines import wait_or_kill
from spantrain.runtime.coordinator.roster import LoggedWorkers
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.testbed.namespace_handle import NamespaceHandle

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0
"""Far more than it takes: workers are killed, but a busy machine is slow to give back what they held."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Torch warns when an address has no name; in an emulated network none has.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # What is loaded before the fork may ask whether there is a GPU: asked of CUDA itself, it would be of no use behind.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class WorkerPlacement(Record):
    """Where a worker of this machine lives."""

    settings: WorkerSettings
    namespace: NamespaceHandle | None = None
    """Of the testbed host to live on; None: this machine's own network."""
    environment: Mapping[str, str] = field(default_factory=dict)


class LocalWorkers(LoggedWorkers):
    """A fork server and the workers it forked; a context manager that leaves nothing behind."""

    def __init__(self, log_folder: Path) -> None:
        super().__init__(log_folder)
        log_folder.mkdir(parents=True, exist_ok=True)
        self._running: set[str] = set()
        self._ended: dict[str, str] = {}
        """How those ended that nobody has been told of."""
        self._changed = threading.Condition()
        self.socket_folder = Path(tempfile.mkdtemp(prefix="spantrain-"))
        """For sockets that these workers are to reach; the fork server removes it, however this process ends."""
        self._ready = threading.Event()
        with (log_folder / "fork-server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "spantrain.runtime.launch.fork_server", str(self.socket_folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._requests, self._answers = self._server.stdin, self._server.stdout
        self._reader = threading.Thread(target=self._read, name="fork-server-reader", daemon=True)
        self._reader.start()

    def start(self, placements: Sequence[WorkerPlacement]) -> None:
        """Start workers; they join on their own.

        A device's worker may be started again after it has ended; of that end nobody is told any more.

        Raises:
            WorkerError: workers cannot be started, or one of these devices still has one.
        """
        if not self._ready.wait(_START_TIMEOUT_S):
            raise WorkerError(f"workers could not be started; see {self._log_folder / 'fork-server.log'}")
        self.check()
        for placement in placements:
            self._take_place(placement.settings.name)
            space = placement.namespace
            request = {
                "name": placement.settings.name,
                "settings": asdict(placement.settings),
                "namespace": None if space is None else {name: getattr(space, name) for name in space.__slots__},
                "environment": dict(placement.environment),
                "log": str(self.log_of(placement.settings.name)),
            }
            self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()

    @property
    def running(self) -> frozenset[str]:
        """Devices whose workers were started and have not ended."""
        with self._changed:
            return frozenset(self._running)

    def signal(self, device: str, number: int) -> None:
        """Send a signal to a device's worker, if it has one."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._requests.write(json.dumps({"name": device, "signal": number}).encode() + b"\n")
            self._requests.flush()

    def ended(self) -> dict[str, str]:
        """Return which devices' workers have ended since this was asked last, and how; none once ends are expected."""
        with self._changed:
            ended, self._ended = self._ended, {}
        return {} if self._closing else ended

    def check(self) -> None:
        """Raise when no workers can be started any more.

        Raises:
            WorkerError: the process that starts them has ended, and they with it.
        """
        if not self._closing and self._server.poll() is not None:
            raise WorkerError(f"the process that starts workers ended; see {self._log_folder / 'fork-server.log'}")

    def close(self) -> None:
        """End all workers that are still there."""
        self._closing = True
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._requests.write(b"\n")  # processes that a user's code has forked keep the pipe open
            self._requests.close()
        if not self._ready.is_set():
            self._server.kill()  # it is still loading torch, and has no workers yet
        wait_or_kill(self._server, _END_TIMEOUT_S)
        shutil.rmtree(self.socket_folder, ignore_errors=True)  # if the fork server did not come to it
        self._reader.join(_END_TIMEOUT_S)
        self._answers.close()

    def _take_place(self, name: str) -> None:
        """Wait until a device's last worker has ended, and begin with another one."""
        with self._changed:
            if not self._changed.wait_for(lambda: name not in self._running, _END_TIMEOUT_S):
                raise WorkerError(f"device {name} has a worker, which has not ended; its log: {self.log_of(name)}")
            self._ended.pop(name, None)
            self._running.add(name)

    def _read(self) -> None:
        for line in self._answers:
            message: dict[str, Any] = json.loads(line)
            if "ready" in message:
                self._ready.set()
                continue
            name, status = message["ended"], message["status"]
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            with self._changed:
                self._running.discard(name)
                self._ended[name] = f"its worker {how}"
                self._changed.notify_all()
        self._ready.set()
