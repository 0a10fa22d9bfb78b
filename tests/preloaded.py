"""Python processes that begin with torch loaded: forked from one that has it, else as `subprocess` starts them.

To load torch and transformers takes each Python process seconds, and a test starts several: here it is done once for
all tests. What is started so has its own process, environment, working directory and pipes, as ever; but it is
no child of who started it, and its command line and modules are those of the process it was forked from, so tests that
look at these take `plain_processes` (conftest.py). What it starts of SpanTrain in turn is forked likewise.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testing.patience import PATIENCE_S, until

ADDRESS = "SPANTRAIN_TESTS_PRELOADED"
"""Of the server's socket, in the environment of all that was started; empty: nothing is forked."""
os.environ["OMP_NUM_THREADS"] = "1"
"""Before torch is loaded, here and in all that is started: threads that share small tensors wait for each other, which
takes several times the processor time of one thread, most of all where there are more processes than processors."""
_CLONE_NEWNET = 0x40000000
_PACKAGES = ("spantrain", "spantrain_studies")
_python = subprocess.Popen


class _Popen(subprocess.Popen):
    """Forks `python -m spantrain...`, of the studies, too, and `python FILE.py`, here or inside a network namespace.

    It starts all else as ever.
    """

    _server: socket.socket | None = None
    _status: int | None = None

    def _execute_child(self, args: Any, *others: Any) -> None:
        # In the order of the arguments of subprocess's own.
        (
            executable,
            before,
            _,
            files,
            cwd,
            env,
            _,
            _,
            shell,
            p2cread,
            p2cwrite,
            c2pread,
            c2pwrite,
            errread,
            errwrite,
        ) = others[:15]
        words = [args] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
        variables = os.environ if env is None else env
        place, words = _inside(words)
        if executable or before or files or shell or not _is_forked(words) or "PYTHONMALLOC" in variables:
            super()._execute_child(args, *others)
            return
        standard = [own if own >= 0 else usual for own, usual in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        environment = {**variables, ADDRESS: start()}
        self._server = _asked(
            {"words": words[1:], "place": place, "cwd": os.fspath(cwd or Path.cwd()), "env": environment}, standard
        )
        self._child_created = True
        self.pid = json.loads(self._server.recv(64))
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._server is None:
            return super()._try_wait(wait_flags)
        if self._status is None:
            if wait_flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
                return 0, 0
            self._status = json.loads(self._server.recv(64) or b"9")  # the server was killed, and all with it
            self._server.close()
        return self.pid, self._status

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._server is None:
            return super()._internal_poll(_deadstate)
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)
        return self.returncode


def install() -> None:
    """From now on this process, and what it starts, starts Python processes so."""
    if os.environ.get(ADDRESS, "-"):
        subprocess.Popen = _Popen


def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `function(number, *args)` in so many processes, each by a module that it finds; all must end well."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task"
        task.write_bytes(pickle.dumps((function, args)))
        words = [sys.executable, str(Path(__file__).with_name("spawned.py")), str(task)]
        processes = [subprocess.Popen([*words, str(number)]) for number in range(nprocs)]
        try:
            until(lambda: any(process.poll() for process in processes) or None not in [p.poll() for p in processes])
            assert [process.poll() for process in processes] == [0] * nprocs, "what they said is on standard error"
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _inside(words: list[Any]) -> tuple[Any, list[Any]]:
    """Return the network namespace that a command line enters, None if none, and what is run there."""
    if words[:3] == ["ip", "netns", "exec"]:
        return f"/run/netns/{words[3]}", words[4:]
    if words[1:3] == ["-I", "-S"] and words[3].endswith("/namespace_handle.py"):
        return json.loads(words[4]), words[6:]
    return None, words


def _is_forked(words: list[Any]) -> bool:
    if len(words) < 2 or words[0] != sys.executable or not os.environ.get(ADDRESS, "-"):
        return False
    return words[1].endswith(".py") or (words[1] == "-m" and words[2].partition(".")[0] in _PACKAGES)


def _asked(request: dict[str, Any], files: list[int]) -> socket.socket:
    """Ask for a process; return what tells its number, and at its end its status."""
    server = _connected(start())
    content = os.memfd_create("request")
    os.write(content, json.dumps(request).encode())
    os.lseek(content, 0, os.SEEK_SET)
    socket.send_fds(server, [b"start"], [content, *files])
    os.close(content)
    return server


def _connected(address: str) -> socket.socket:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            server.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):  # it is loading
            server.close()
            assert time.monotonic() < end_s, "the process with torch loaded did not start"
            time.sleep(0.05)
        else:
            return server


def start() -> str:
    """Begin to load torch, unless that was begun before this process or in it; return where to ask for processes."""
    if ADDRESS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="preloaded-")
        os.environ[ADDRESS] = address = str(Path(folder.name) / "socket")
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # CUDA itself does not outlive a fork
        command = [sys.executable, __file__, address]
        server = _python(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)
        atexit.register(_end, server, folder)
    return os.environ[ADDRESS]


def _end(server: "subprocess.Popen[bytes]", folder: "tempfile.TemporaryDirectory[str]") -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    folder.cleanup()


def _serve(address: str) -> None:
    """Fork what is asked for until standard input ends; then end all of it."""
    gc.disable()
    _load()
    gc.freeze()  # what is loaded stays, and its pages stay shared
    gc.set_threshold(10_000, 20, 50)
    gc.enable()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([0, listener, wake_read], [], [])
        if 0 in readable:
            break
        if wake_read in readable:
            os.read(wake_read, 4096)
            _reap(children)
        if listener in readable:
            asker, _ = listener.accept()
            if not _fork(asker, children):
                for other in (listener, *children.values()):
                    other.close()
                return
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _load() -> None:
    """Load all that forks may have; gRPC and ZeroMQ break in them only if they were used before."""
    from spantrain.runtime.launch import fork_server

    fork_server.load()
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    import spantrain

    with contextlib.suppress(ImportError):
        importlib.import_module("typer._adapters")  # newer ones load pydantic for the first command
    for module in pkgutil.walk_packages(spantrain.__path__, "spantrain."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False  # torch's take down its operators, one after the other, at the end of each process


def _fork(asker: socket.socket, children: dict[int, socket.socket]) -> bool:
    """Fork; return whether this is still the server. In the child, everything is as a new process has it."""
    _, files, _, _ = socket.recv_fds(asker, 16, 4)
    with open(files[0], "rb") as content:
        request = json.load(content)
    pid = os.fork()
    if pid:
        for file in files[1:]:
            os.close(file)
        children[pid] = asker
        return True
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for place, file in enumerate(files[1:]):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    asker.send(json.dumps(os.getpid()).encode())  # as late as a new process begins
    asker.close()
    tempfile.tempdir = None
    _enter(request["place"])
    sys.argv = request["words"]
    return False


def _enter(place: Any) -> None:
    if isinstance(place, str):
        with open(place, "rb") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0, place
    elif place:
        from spantrain.testbed.namespace_handle import NamespaceHandle

        NamespaceHandle(**place).enter()


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        asker = children.pop(pid)
        with contextlib.suppress(OSError):
            asker.send(json.dumps(status).encode())
        asker.close()


def _become(words: list[str]) -> None:
    """Do what Python does with such words."""
    warnings.simplefilter("ignore", RuntimeWarning)  # the module was loaded before
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [path for path in added if path and path not in sys.path]  # in the place of tests/
    if words[0] == "-m":
        sys.argv = words[1:]
        install()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        install()
        runpy.run_path(words[0], run_name="__main__")


def _end_as_python_does() -> None:
    """Do what the end of a process does, but for the seconds that it takes to undo all that was loaded."""
    error = sys.exc_info()[1]
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError, ValueError):
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
    try:
        _become(sys.argv)
    finally:
        _end_as_python_does()
