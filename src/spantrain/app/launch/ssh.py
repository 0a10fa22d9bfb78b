"""Start workers on hosts that are reached by ssh, or on this machine; in containers, if there is an image."""

import datetime
import os
import shlex
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from spantrain.app.launch.way import LaunchedWorkers, LaunchWay, WantedWorkers
from spantrain.app.reporter import Reporter
from spantrain.core.cluster import Device
from spantrain.core.names import few
from spantrain.errors import ConfigError, PeerLostError
from spantrain.reach.allocations import host_machines
from spantrain.reach.kept import KeptMachine
from spantrain.reach.machines import PYTHON, Machine, at_once

T = TypeVar("T")
_NEEDED = ("spantrain", "torch")
_MAX_LOG_BYTES = 2**30
_RESTART_S, _LONGEST_S = 1.0, 60.0
"""Behind a worker's end: the coordinator has taken note of it then; each further time twice as long, up to that."""


class SshWorkers(LaunchedWorkers):
    """Each host by ssh, as the cluster file calls it; those that are this machine without."""

    def __init__(self, wanted: WantedWorkers, way: LaunchWay, reporter: Reporter) -> None:
        super().__init__(wanted, way, reporter)
        self._words: dict[str, list[str]] = {}
        self._machines: dict[str, KeptMachine] = {}
        self._logs = _Logs(self.log_of)
        self._join = self._token = ""
        self._starts: Counter[str] = Counter()
        self._reaching = threading.Lock()
        """Held while another takes a machine's place."""

    def prepare(self) -> None:
        """Reach all machines, copy code to those that have not got it, and look whether they have what is needed.

        Raises:
            PeerLostError: some cannot be reached.
            ConfigError: some lack something that workers need.
        """
        self._words = self.words_of_all()
        self.reporter.phase(f"Reaching {len(self.wanted.by_host)} machines")
        for host in self.wanted.by_host:
            self._machines[host] = self._reached(host)
        code = self.options.code
        if code is not None:
            sent = self._on_all(lambda _host, machine: machine.place(code))
            hosts = [host for host, was in sent.items() if was]
            where = f"copied to {few(hosts)}" if hosts else "is on all machines already"
            self.reporter.note(f"Code {code.root} ({len(code.packed) / 1e6:.1f} MB, {code.digest[:12]}): {where}")
        problems, missing = [], dict[str, list[str]]()
        for host, (lacks, paths) in self._on_all(self._look).items():
            machine = self._machines[host].machine
            if lacks:
                problems.append(
                    f"{machine}: {machine.python} cannot import {' and '.join(lacks)}; install it there (pip install "
                    f"spantrain), or name the interpreter that has it: --python {machine.name}=PATH"
                )
            for path in paths:
                missing.setdefault(path, []).append(host)
        problems += [
            f"data {path} is not on {', '.join(hosts)}; copy it there: code is copied, data are not"
            for path, hosts in missing.items()
        ]
        if problems:
            raise ConfigError(
                "; ".join(problems) if len(problems) == 1 else "\n  ".join(["machines lack what is needed:", *problems])
            )

    def _reached(self, host: str) -> KeptMachine:
        return KeptMachine(self.machine(host), within=self.within(), heard=self._logs.write, ended=self._heard_end)

    def machine(self, host: str) -> Machine:
        """Return a host of the cluster as it is reached."""
        entry = self.wanted.cluster.host_by_name[host]
        place = (host, entry.site)
        (found,) = host_machines([entry], options=self.options.words_at(place))
        # In a container it is the container's own, if nothing is said.
        return replace(found, python=self.options.python_at(place, PYTHON if self.options.image else found.python))

    def within(self) -> list[str]:
        """Return the words that run a command in a container; none without an image.

        It has the host's network and accelerators, data where the host has them, and the cache that code is kept in.
        """
        if self.options.image is None:
            return []
        words = ["docker", "run", "--rm", "--interactive", "--init", "--network=host", "--ipc=host", "--entrypoint="]
        if any(self.wanted.cluster.device_by_name[device].backend.startswith("cuda") for device in self.wanted.devices):
            words += ["--gpus=all"]
        for path in self.wanted.data:
            words += ["--mount", f"type=bind,readonly,source={path},target={path}"]
        words += ["--mount", "type=volume,source=spantrain-code,target=/root/.cache/spantrain"]
        return [*words, self.options.image]

    def _look(self, host: str, machine: KeptMachine) -> tuple[tuple[str, ...], tuple[str, ...]]:
        own = self.options.environment_at((host, self.wanted.cluster.host_by_name[host].site))
        return machine.look(_NEEDED, self.wanted.data, python_path=own.get("PYTHONPATH", ""))

    def start(self, join: str, token: str) -> None:
        """Start all workers; each says itself that it joins."""
        self._join, self._token = join, token

        def on_host(host: str, machine: KeptMachine) -> None:
            for device in self.wanted.by_host[host]:
                self._start(device, machine)

        self.wanted.log_folder.mkdir(parents=True, exist_ok=True)
        self._on_all(on_host)

    def close(self) -> None:
        """End all workers, and what keeps them on their machines."""
        with self._reaching:
            self._on_all(lambda _host, machine: machine.close())
        self._logs.close()

    def _on_all(self, work: Callable[[str, KeptMachine], T]) -> dict[str, T]:
        """Do something on all machines at once; raise what was raised for the first of them."""
        done = at_once(lambda entry: work(*entry), list(self._machines.items()), threading.Event())
        return dict(zip(self._machines, done, strict=True))

    def _start(self, device: Device, machine: KeptMachine) -> None:
        words, place = self._words[device.name], (device.host, device.site)
        self._logs.write(device.name, f"{_now()} on {machine.machine}: {machine.machine.python} {shlex.join(words)}")
        machine.start(device.name, words, self.options.told_at(place, self._join, self._token))

    def _heard_end(self, device: str, how: str) -> None:
        last, left = self._logs.last_line(device), how.endswith("status 0")
        self._logs.write(device, f"{_now()} {how}")
        self.note_end(device, how if left or "status" not in how else f"{how} ({last})")
        self._starts[device] += 1
        if self._starts[device] <= self.way.restarts and not left:
            # In a thread of its own: this one is to hear the machine's answer.
            wait_s = min(_RESTART_S * 2 ** (self._starts[device] - 1), _LONGEST_S)
            again = threading.Timer(wait_s, self._start_again, (self.wanted.cluster.device_by_name[device],))
            again.daemon = True
            again.start()

    def _start_again(self, device: Device) -> None:
        """Start a worker once more, on its machine reached once more where that was cut off."""
        with self._reaching:
            if self._closing:
                return
            if (machine := self._machines[device.host]).is_cut_off:
                machine.close()
                machine = self._machines[device.host] = self._reached(device.host)
        try:
            if self.options.code is not None:
                machine.place(self.options.code)
            self._start(device, machine)
        except PeerLostError as error:
            if not self._closing:
                self._heard_end(device.name, f"cannot be started again: {error}")


def _now() -> str:
    return datetime.datetime.now().isoformat(sep=" ", timespec="seconds")


class _Logs:
    """Files of this machine that lines of workers come to."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._path_of = path_of
        self._stack = ExitStack()
        self._files: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._last: dict[str, str] = {}
        self._lock = threading.Lock()

    def write(self, device: str, line: str) -> None:
        """Write a line; what is more than a log may have is left, and a full disk here ends no worker there."""
        with self._lock, suppress(OSError):
            shown = "".join(one for one in line if one.isprintable()).strip()[:300]
            self._last[device] = shown or self._last.get(device, "")
            if device not in self._files:
                self._files[device] = os.open(self._path_of(device), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._stack.callback(os.close, self._files[device])
            data = line.encode(errors="replace") + b"\n"
            self._bytes[device] = self._bytes.get(device, 0) + len(data)
            if self._bytes[device] <= _MAX_LOG_BYTES:
                os.write(self._files[device], data)

    def last_line(self, device: str) -> str:
        """Return the last line that is not empty, without what could steer a terminal."""
        return self._last.get(device, "")

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._stack.close()
            self._files.clear()
