"""What all ways to start workers elsewhere have in common: who is started, with which words, what is heard of it."""

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import ClassVar

from spantrain.app.reporter import Reporter
from spantrain.core.cluster import Cluster, Device
from spantrain.core.names import unknown_name
from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.reach.code import PackedCode
from spantrain.runtime.coordinator.roster import LoggedWorkers, WorkerStarter, join_command
from spantrain.transport.relay.protocol import RelayAccess


class WantedWorkers(Record):
    """Which workers a session needs, and what they need on their machines."""

    cluster: Cluster
    devices: tuple[str, ...]
    log_folder: Path
    functions: tuple[str, ...] = ()
    """The user's functions that they may call, by paths of this machine."""
    data: tuple[str, ...] = ()
    """Files and folders that they read."""
    encrypted: bool = True

    @property
    def by_host(self) -> dict[str, tuple[Device, ...]]:
        """The devices of each host that has any, in the cluster's order."""
        found: dict[str, tuple[Device, ...]] = {}
        for device in self.cluster.devices:
            if device.name in self.devices:
                found[device.host] = (*found.get(device.host, ()), device)
        return found

    @property
    def by_site(self) -> dict[str, dict[str, tuple[Device, ...]]]:
        """Of each site that has any, the devices of each host."""
        found: dict[str, dict[str, tuple[Device, ...]]] = {}
        for host, devices in self.by_host.items():
            found.setdefault(devices[0].site, {})[host] = devices
        return found


class LaunchOptions(Record):
    """What a user says of machines, by host or site; under the empty name what holds for all others."""

    code: PackedCode | None = None
    python: Mapping[str, str] = field(default_factory=dict)
    """The interpreter that has SpanTrain."""
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Variables of workers."""
    relays: Mapping[str, RelayAccess] = field(default_factory=dict)
    """What those dial that can only dial out; all with one token."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further words for the tool that starts them."""
    image: str | None = None
    """Of a container that has SpanTrain."""

    def check_names(self, cluster: Cluster) -> None:
        """Refuse names that are none of the cluster's.

        Raises:
            ConfigError: one is not.
        """
        known = ("", *cluster.host_by_name, *cluster.site_by_name)
        for option, table in (
            ("--python", self.python), ("--env", self.environment), ("--relay", self.relays), ("--option", self.words),
        ):  # fmt: skip
            for name in table:
                if name not in known:
                    raise ConfigError(f"{option} {name}=...: {unknown_name('the host or site', name, known[1:])}")

    def python_at(self, place: Sequence[str], default: str = "python3") -> str:
        """Return the interpreter at the first of some hosts and sites of which one is said."""
        return next((self.python[name] for name in (*place, "") if name in self.python), default)

    def environment_at(self, place: Sequence[str]) -> dict[str, str]:
        """Return the variables of workers at some hosts and sites, the first of which count most."""
        found: dict[str, str] = {}
        for name in ("", *reversed(place)):
            found |= self.environment.get(name, {})
        return found

    def told_at(self, place: Sequence[str], join: str, token: str) -> dict[str, str]:
        """Return all variables of workers at some hosts and sites, who join a coordinator."""
        told = joining(join, token, self.relay_at(place)) | {"PYTHONUNBUFFERED": "1"}
        return self.environment_at(place) | told

    def relay_at(self, place: Sequence[str]) -> RelayAccess | None:
        """Return the relay of the first of some hosts and sites of which one is said; None: others can dial them."""
        return next((self.relays[name] for name in (*place, "") if name in self.relays), None)

    def words_at(self, place: Sequence[str]) -> tuple[str, ...]:
        """Return the further words for some hosts and sites, those for all first."""
        return tuple(word for name in ("", *reversed(place)) for word in self.words.get(name, ()))

    def worker_words(self, wanted: WantedWorkers, device: Device, *, sees_one_gpu: bool = False) -> list[str]:
        """Return the words behind the interpreter's that run a device's worker; address and token are not among them.

        `sees_one_gpu`: it is given its GPU alone, which is then the first.

        Raises:
            ConfigError: it calls a function that is not in the code that is copied.
        """
        backend = "cuda:0" if sees_one_gpu and device.backend.startswith("cuda") else device.backend
        words = ["-m", "spantrain", "worker", "--name", device.name, "--backend", backend]
        words += ["--keep", "0"]  # it ends with whoever started it
        if (address := wanted.cluster.host_by_name[device.host].address) is not None:
            words += ["--data-address", address]
        if (relay := self.relay_at((device.host, device.site))) is not None:
            words += ["--relay", str(relay.address)]
        if not wanted.encrypted:
            words.append("--insecure")
        for function in wanted.functions:
            words += ["--function", self._function_there(function)]
        return words

    def _function_there(self, function: str) -> str:
        file, _, name = function.rpartition(":")
        if not file.endswith(".py"):
            return function
        inside = self.code.inside(Path(file)) if self.code else None
        if inside is None:
            raise ConfigError(
                f"{function}: workers call it, and it is not in what is copied; give --code with its folder"
            )
        return f"{inside}:{name}"


def joining(join: str, token: str, relay: RelayAccess | None) -> dict[str, str]:
    """Return the variables by which a worker joins: on its command line others could see them."""
    through = {} if relay is None else {"SPANTRAIN_RELAY_TOKEN": relay.token}
    return {"SPANTRAIN_JOIN": join, "SPANTRAIN_TOKEN": token, **through}


class StartedWorkers(LoggedWorkers):
    """Workers that were, or will be, started: what is known of them."""

    def __init__(self, wanted: WantedWorkers, reporter: Reporter) -> None:
        super().__init__(wanted.log_folder)
        self.wanted = wanted
        self.reporter = reporter
        self._lock = threading.Lock()
        self._ends: dict[str, str] = {}

    @abstractmethod
    def start(self, join: str, token: str) -> None:
        """Start them, to join there.

        Raises:
            WorkerError, PeerLostError, UsageError: they cannot be started.
        """

    def ended(self) -> dict[str, str]:
        """Return, and tell, whose workers have ended since this was asked last, and how; none once that is expected."""
        with self._lock:
            found, self._ends = self._ends, {}
        if self._closing:
            return {}
        for device, how in found.items():
            self.reporter.note(f"Device {device}: {how}; its log: {self.where_is_log(device)}")
        return found

    def note_end(self, device: str, how: str) -> None:
        """Take it that a worker has ended."""
        with self._lock:
            self._ends[device] = how


class StartedByHand(StartedWorkers):
    """People start them: they are told how."""

    def start(self, join: str, token: str) -> None:
        """Say what is to be started."""
        self.reporter.note(
            f"Waiting for {len(self.wanted.devices)} workers; on each machine run:\n"
            f"  {join_command(join, token, 'DEVICE')}\n"
            f"  with DEVICE one of {', '.join(self.wanted.devices)}"
        )

    def close(self) -> None:
        """Nothing: workers leave when the coordinator says so."""

    where_is_log = WorkerStarter.where_is_log


class LaunchWay(Record):
    """How a run's workers are started."""

    workers: "type[LaunchedWorkers]"
    """What starts them."""
    options: LaunchOptions = field(default_factory=LaunchOptions)
    command: tuple[str, ...] = ()
    """The words of `spantrain launch`, for messages about how to go on."""
    only_writes: bool = False
    """Write what would start them, and no more."""
    restarts: int = 0
    """How often a device's worker that has failed is started again, by those that can."""

    def prepare(self, wanted: WantedWorkers, reporter: Reporter) -> "LaunchedWorkers":
        """Return the workers, for whom all is done that can be done before there is a coordinator.

        Raises:
            UsageError: something is missing there; all of it is told at once.
            PeerLostError: a machine cannot be reached.
        """
        workers = self.workers(wanted, self, reporter)
        try:
            workers.prepare()
        except BaseException:
            workers.close()
            raise
        return workers


class LaunchedWorkers(StartedWorkers):
    """Workers that are started in some way."""

    patience_s: ClassVar[float] = 600.0
    """How long they may take to join."""

    def __init__(self, wanted: WantedWorkers, way: LaunchWay, reporter: Reporter) -> None:
        super().__init__(wanted, reporter)
        self.way, self.options = way, way.options

    @abstractmethod
    def prepare(self) -> None:
        """Reach machines, copy code, write files.

        Raises:
            UsageError, PeerLostError: as `LaunchWay.prepare`.
        """

    def words_of_all(self, *, sees_one_gpu: bool = False) -> dict[str, list[str]]:
        """Return the words of all workers, by device.

        Raises:
            ConfigError: as `LaunchOptions.worker_words`.
        """
        wanted, devices = self.wanted, self.wanted.cluster.device_by_name
        return {
            name: self.options.worker_words(wanted, devices[name], sees_one_gpu=sees_one_gpu) for name in wanted.devices
        }


class OnlyWrittenError(Exception):
    """Files were written that would start the workers, as was asked; there is no run."""
