"""Keeps workers on a machine: sent there as text and run by its `python3`, with the standard library alone.

A JSON object a line comes in, and goes out (`reach.kept` is the other end). When the input ends, however the program
at its other end died, all workers end: nothing here outlives whoever started it.
"""

from __future__ import annotations  # so that an old Python comes as far as to say that it is one

import contextlib
import ctypes
import hashlib
import io
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

MAX_CODE_BYTES = 64 * 2**20
"""Of the user's code, packed."""
_MAX_UNPACKED_BYTES = 512 * 2**20
_MAX_LINE = 8192
"""Bytes of a worker's line that are sent on."""
_MOST_WAITING = 10_000
"""Lines that wait to be sent; where the way back is slower than that, lines are left out, and workers do not wait."""
_GOODBYE_S = 3.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def code_folder(digest: str) -> Path:
    """Return where code of this digest lies in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "spantrain" / "code" / digest


def place_code(digest: str, packed: bytes) -> Path:
    """Unpack code into the cache, all of it or nothing; return its folder.

    Raises:
        ValueError: it is not what the digest says, or has what code has not: links, devices, paths that lead elsewhere.
        OSError: it cannot be written.
    """
    folder = code_folder(digest)
    if hashlib.sha256(packed).hexdigest() != digest:
        raise ValueError("the code came damaged")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        _unpack(packed, beside)
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another one was quicker
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _unpack(packed: bytes, folder: Path) -> None:
    left = _MAX_UNPACKED_BYTES
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        for member in archive:
            path, left = Path(member.name), left - member.size
            if not member.isreg() or path.is_absolute() or ".." in path.parts or left < 0:
                most = f"{_MAX_UNPACKED_BYTES >> 20} MiB"
                raise ValueError(f"{member.name}: is nothing that code has, or brings it over {most}")
            content = archive.extractfile(member)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content.read() if content else b"")


class Keeper:
    """Starts workers, sends on what they print and how they end."""

    def __init__(self) -> None:
        self._code: Path | None = None
        self._workers: list[subprocess.Popen[bytes]] = []
        self._outgoing: queue.Queue[dict[str, object]] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._send, daemon=True).start()

    def serve(self) -> None:
        """Do what is asked until the input ends."""
        for line in iter(sys.stdin.buffer.readline, b""):
            request = json.loads(line)
            try:
                answer = getattr(self, f"_{request.pop('do')}")(**request)
            except (OSError, ValueError, tarfile.TarError) as error:
                answer = {"problem": f"{type(error).__name__}: {error}"}
            self._outgoing.put({"answer": answer})

    def end(self) -> None:
        """End all workers: a goodbye first, which lets others join in their names at once."""
        deadline_s = time.monotonic() + _GOODBYE_S
        for number in (signal.SIGINT, signal.SIGKILL):
            for worker in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    if worker.poll() is None:
                        os.killpg(worker.pid, number)
            while time.monotonic() < deadline_s and any(worker.poll() is None for worker in self._workers):
                time.sleep(0.02)

    # What can be asked.

    def _find_code(self, digest: str) -> dict[str, object]:
        folder = code_folder(digest)
        self._code = folder if folder.is_dir() else None
        return {"found": self._code is not None}

    def _take_code(self, digest: str, size: int) -> dict[str, object]:
        if size > MAX_CODE_BYTES:
            raise ValueError(f"{size} bytes of code are too many")
        self._code = place_code(digest, sys.stdin.buffer.read(size))
        return {"found": True}

    def _look(self, modules: list[str], paths: list[str], python_path: str) -> dict[str, object]:
        """Say what is not there of modules to import, and of paths."""
        sys.path[:0] = [*([str(self._code)] if self._code else []), *filter(None, python_path.split(os.pathsep))]
        lacks = [name for name in modules if find_spec(name) is None]
        return {"lacks": lacks, "missing": [path for path in paths if not Path(path).exists()]}

    def _start(self, name: str, words: list[str], environment: dict[str, str]) -> dict[str, object]:
        own = {**os.environ, **environment}
        if self._code is not None:
            own["PYTHONPATH"] = os.pathsep.join([str(self._code), *filter(None, [own.get("PYTHONPATH")])])
        worker = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=own,
            cwd=self._code or Path.home(),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._workers.append(worker)
        threading.Thread(target=self._follow, args=(name, worker), daemon=True).start()
        return {}

    # Threads.

    def _follow(self, name: str, worker: subprocess.Popen[bytes]) -> None:
        output = worker.stdout
        assert output is not None
        left_out = 0
        for line in iter(lambda: output.readline(_MAX_LINE), b""):
            try:
                self._outgoing.put_nowait({"worker": name, "line": line.decode(errors="replace").rstrip("\n")})
            except queue.Full:
                left_out += 1
        self._outgoing.put({"worker": name, "ended": worker.wait(), "left_out": left_out})

    def _send(self) -> None:
        while True:
            sys.stdout.write(json.dumps(self._outgoing.get()) + "\n")
            sys.stdout.flush()


def end_with_parent() -> None:
    """Have the kernel end this process with the one that has started it, on Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(*_: object) -> None:
    raise SystemExit


def main() -> None:
    """Keep workers until the input ends, or a signal comes."""
    if sys.version_info < (3, 11):  # noqa: UP036 - it may be any
        sys.exit(f"Python {platform.python_version()} is too old: SpanTrain needs 3.11")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    keeper = Keeper()
    try:
        keeper.serve()
    except SystemExit:
        pass
    finally:
        keeper.end()
    os._exit(0)  # threads still wait for what does not come


if __name__ == "__main__":
    main()
