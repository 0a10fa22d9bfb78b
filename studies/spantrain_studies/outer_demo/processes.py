"""The processes of the outer optimizer's demonstration: started, read line by line, told to end, never left behind."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from spantrain.core.names import file_stem
from spantrain.errors import WorkerError
from spantrain.testbed.testbed import Testbed

_END_S = 5.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}

Heard = tuple[float, str, Mapping[str, Any] | None]
"""When, of which process, what it printed; None: it has ended."""


class DemoProcesses:
    """A context manager; a process whose parent dies sees the end of its input, and ends."""

    def __init__(self, log_folder: Path, testbed: Testbed | None, environment: Mapping[str, str]) -> None:
        self._log_folder = log_folder
        self._testbed = testbed
        self._environment = {**environment, **_ENVIRONMENT}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: dict[str, threading.Thread] = {}
        self._heard: Queue[Heard] = Queue()
        log_folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "DemoProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str, order: Mapping[str, Any], *, host: str) -> None:
        """Start a process on a host of the testbed, or here if there is none, and tell it what to be."""
        argv = [sys.executable, "-m", "spantrain_studies.outer_demo.roles"]
        with self.log_of(name).open("ab") as log:
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": log,
                "env": self._environment,
                "start_new_session": True,
            }
            found = self._testbed.popen(host, argv, **pipes) if self._testbed else subprocess.Popen(argv, **pipes)
        self._processes[name] = found
        self._write(name, {**order, "name": name})
        self._readers[name] = threading.Thread(target=self._read, args=(name, found), name=f"read-{name}", daemon=True)
        self._readers[name].start()

    def log_of(self, name: str) -> Path:
        """Return where a process's errors go."""
        return self._log_folder / f"{file_stem(name)}.log"

    def stop(self, name: str) -> None:
        """Ask a process to end in its own time."""
        self._write(name, {"stop": True})

    def wait(self, name: str, timeout_s: float) -> bool:
        """Wait for a process that was asked to end; return whether it has."""
        try:
            self._processes[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def next(self, timeout_s: float) -> Heard | None:
        """Return what was said next, or None if nothing was in that time."""
        try:
            return self._heard.get(timeout=timeout_s)
        except Empty:
            return None

    def wait_for(self, name: str, key: str, timeout_s: float) -> Mapping[str, Any]:
        """Return a process's first message with a key; all before it is lost.

        Raises:
            WorkerError: a process ended, or it took too long.
        """
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            heard = self.next(left_s)
            if heard is not None and heard[2] is None:
                raise WorkerError(self.how_it_ended(heard[1]))
            if heard is not None and heard[1] == name and heard[2] is not None and key in heard[2]:
                return heard[2]
        raise WorkerError(f"{name} was not ready in {timeout_s:.0f} s; its log: {self.log_of(name)}")

    def how_it_ended(self, name: str) -> str:
        """Say how a process ended, with the last line of its log."""
        code = self._processes[name].wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        lines = self.log_of(name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{name} {how}; {lines[-1] if lines else 'it said nothing'}; its log: {self.log_of(name)}"

    def close(self) -> None:
        """End all that is still there, at once: by the end of their input, else by force."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        end_s = time.monotonic() + _END_S
        for process in self._processes.values():
            try:
                process.wait(max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers.values():
            reader.join()
        for process in self._processes.values():
            assert process.stdout is not None
            process.stdout.close()

    def _write(self, name: str, order: Mapping[str, Any]) -> None:
        stdin = self._processes[name].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return  # it has ended, which its reader tells

    def _read(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._heard.put((time.monotonic(), name, json.loads(line)))
        self._heard.put((time.monotonic(), name, None))
