"""A coordinator with workers, on this machine's testbed, on its loopback, or on machines that join."""

import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field
from pathlib import Path

from spantrain.app.launch.way import LaunchWay, OnlyWrittenError, StartedByHand, WantedWorkers
from spantrain.app.relay import reached_through
from spantrain.app.reporter import Reporter
from spantrain.core.cluster import Cluster
from spantrain.core.records import Record
from spantrain.errors import ConfigError, PeerLostError, TestbedError, UsageError
from spantrain.runtime.coordinator.coordinator import Coordinator
from spantrain.runtime.launch.launcher import LocalWorkers, WorkerPlacement
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.testbed.testbed import Testbed, why_unavailable
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import Credentials
from spantrain.transport.relay.protocol import RelayAccess

_LOCAL_JOIN_TIMEOUT_S = 120.0
_LOCAL_HEARTBEAT_TIMEOUT_S = 60.0
"""For workers of this machine: their deaths are seen at once without heartbeats, and a crowded machine is slow."""
_BACK_S = 60.0
"""How long the last ones are awaited where others hold all of a run; they may join later."""


class SessionOptions(Record):
    """Where the workers run."""

    listen: str | None = None
    """HOST:PORT to wait on for workers of other machines; None: start all workers here."""
    relay: RelayAccess | None = None
    """Through which workers of other sites reach this machine, at the port of `listen` and the next."""
    launch: LaunchWay | None = None
    """What starts the workers of other machines; None: people do."""
    network: bool = True
    """Emulate the links between sites; False: all on loopback, unshaped."""
    encrypted: bool = True
    """Encrypt and authenticate the data between workers."""
    functions: tuple[str, ...] = ()
    """Users' functions for model, data and loss that workers started here, or by `launch`, may call."""
    data: tuple[str, ...] = ()
    """Files and folders that workers read, for `launch` to look whether they are there."""
    join_timeout_s: float = 600.0
    """How long to wait for workers of other machines."""
    heartbeat_timeout_s: float | None = None
    """After what silence a worker is lost; None: as measured, 6 s at most; here a minute, where its end is seen."""
    is_enough: Callable[[Coordinator], bool] = lambda _coordinator: False
    """Says whether a run can go on with the workers of other machines that have joined, without those that have not."""
    credentials: Path | None = None
    """The file of what workers of other machines know the coordinator by, so that one that is started again is the same
    for them; made if it is not there. None: nothing is kept."""

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "heartbeat_timeout_s"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ConfigError(f"SessionOptions: {name} must be a finite number of seconds over 0, got {value!r}")
        if self.relay is not None and (self.listen is None or not Address.parse(self.listen).port):
            raise ConfigError(
                "--relay: goes with --listen HOST:PORT; PORT and the next must be of the relay's ports, too"
            )


class Generations:
    """Numbers what the workers of a session run, one thing after another (DESIGN idea 8).

    >>> generations = Generations()
    >>> [generations.following(0), generations.following(0), generations.following(5), generations.following(3)]
    [0, 1, 5, 6]
    """

    def __init__(self) -> None:
        self._latest = -1

    def following(self, wanted: int, *, goes_on: bool = False) -> int:
        """Return the number of the next plan: its own, if that is newer; the newest too, where its run goes on."""
        own = wanted > self._latest or (goes_on and wanted == self._latest)
        self._latest = wanted if own else self._latest + 1
        return self._latest

    def taken(self, generation: int) -> None:
        """Note a number that was used: for measuring, or by a plan that took over while another ran."""
        self._latest = max(self._latest, generation)


class Session(Record):
    """Workers that have joined and wait for orders."""

    cluster: Cluster
    devices: tuple[str, ...]
    coordinator: Coordinator
    network: str
    """What the links are: `testbed`, `loopback, unshaped` or `real`."""
    testbed: Testbed | None = None
    workers: LocalWorkers | None = None
    placement: Callable[[str], WorkerPlacement] | None = None
    """Where a device's worker lives, if this machine starts them."""
    outlived: bool = False
    """Whether its workers go on without this process, until a coordinator of the same credentials is there."""
    generations: Generations = field(default_factory=Generations)

    def start_again(self, device: str) -> None:
        """Start the worker of a device whose last one has ended; it joins by itself.

        Raises:
            UsageError: workers of other machines are not started here.
            WorkerError: it cannot be started, or has not ended.
        """
        if self.workers is None or self.placement is None:
            raise UsageError(f"{device}: its worker is started on its own machine: spantrain worker --join")
        self.workers.start([self.placement(device)])


@contextmanager
def open_session(
    cluster: Cluster, devices: Sequence[str], options: SessionOptions, log_folder: Path, reporter: Reporter
) -> Iterator[Session]:
    """Bring workers up for these devices; take everything down at the end, however it comes.

    Raises:
        TestbedError: the emulated network is wanted and cannot be had here.
        PeerLostError: workers did not join in time.
    """
    with ExitStack() as stack:
        wanted = WantedWorkers(
            cluster=cluster,
            devices=tuple(devices),
            log_folder=log_folder,
            functions=options.functions,
            data=options.data,
            encrypted=options.encrypted,
        )
        bring_up = _local if options.listen is None else _remote
        yield bring_up(wanted, options, reporter, stack)


def _remote(wanted: WantedWorkers, options: SessionOptions, reporter: Reporter, stack: ExitStack) -> Session:
    listen, launch, relay = options.listen, options.launch, options.relay
    assert listen is not None, "it is for other machines"
    cluster, devices = wanted.cluster, wanted.devices
    if launch:
        launch.options.check_names(cluster)
    workers = stack.enter_context(launch.prepare(wanted, reporter) if launch else StartedByHand(wanted, reporter))
    # Workers that end with this process have no use for one that is started again.
    kept = options.credentials if launch is None or launch.only_writes else None
    credentials = Credentials.kept_in(kept) if kept and (launch or kept.exists()) else Credentials.create()
    if launch and launch.only_writes:
        workers.start(listen, credentials.token.text)
        raise OnlyWrittenError
    coordinator = Coordinator(
        bind=listen,
        reached_at=str(stack.enter_context(reached_through(relay, Address.parse(listen), 2))[0]) if relay else "",
        devices=devices,
        sites={device.name: device.site for device in cluster.devices},
        starter=workers,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        credentials=credentials,
    )
    coordinator.refusals.name, coordinator.refusals.tell = "The coordinator", reporter.note
    coordinator.start()
    stack.callback(coordinator.stop)
    if kept:
        credentials.keep(kept)
        stack.callback(_forget_unused, kept)
    stack.callback(workers.expect_ends)  # before that
    workers.start(coordinator.join_address, coordinator.token)
    patience_s = launch.workers.patience_s if launch else options.join_timeout_s
    wait_for(coordinator, devices, patience_s, reporter, tell=reporter.note, is_enough=options.is_enough)
    return Session(cluster=cluster, devices=devices, coordinator=coordinator, network="real", outlived=kept is not None)


def _forget_unused(credentials: Path) -> None:
    """Remove credentials beside which there is no journal: no run has begun, or it has ended."""
    if [*credentials.parent.glob("*")] == [credentials]:
        shutil.rmtree(credentials.parent)


def _local(wanted: WantedWorkers, options: SessionOptions, reporter: Reporter, stack: ExitStack) -> Session:
    cluster, devices = wanted.cluster, wanted.devices
    use_testbed = options.network and len({cluster.device_by_name[name].host for name in devices}) > 1
    if use_testbed and (reason := why_unavailable()) is not None:
        raise TestbedError(f"{reason}; or run with --no-network (loopback, unshaped)")
    reporter.phase(f"Starting {len(devices)} workers")
    workers = stack.enter_context(LocalWorkers(wanted.log_folder))
    testbed = stack.enter_context(Testbed.up(cluster)) if use_testbed else None
    coordinator = Coordinator(
        bind=f"unix:{workers.socket_folder / 'coordinator'}",
        devices=devices,
        sites={device.name: device.site for device in cluster.devices},
        starter=workers,
        heartbeat_timeout_s=options.heartbeat_timeout_s or _LOCAL_HEARTBEAT_TIMEOUT_S,
    )
    coordinator.start()
    stack.callback(coordinator.stop)
    stack.callback(workers.expect_ends)  # before that
    placement = functools.partial(_placement, cluster, coordinator, testbed, options)
    workers.start([placement(name) for name in devices])
    wait_for(coordinator, devices, _LOCAL_JOIN_TIMEOUT_S, reporter)
    return Session(
        cluster=cluster,
        devices=devices,
        coordinator=coordinator,
        network="testbed" if testbed else "loopback, unshaped",
        testbed=testbed,
        workers=workers,
        placement=placement,
    )


def _placement(
    cluster: Cluster, coordinator: Coordinator, testbed: Testbed | None, options: SessionOptions, name: str
) -> WorkerPlacement:
    device = cluster.device_by_name[name]
    settings = WorkerSettings(
        join=coordinator.join_address,
        token=coordinator.token,
        name=name,
        backend=device.backend,
        data_address=testbed.address(device.host) if testbed else "127.0.0.1",
        encrypted=options.encrypted,
        functions=options.functions,
    )
    return WorkerPlacement(
        settings=settings,
        namespace=testbed.namespace(device.host) if testbed else None,
        environment={"GLOO_SOCKET_IFNAME": testbed.interface(device.host) if testbed else "lo"},
    )


def wait_for(
    coordinator: Coordinator,
    names: Sequence[str],
    timeout_s: float,
    reporter: Reporter,
    *,
    tell: Callable[[str], None] = lambda _text: None,
    is_enough: Callable[[Coordinator], bool] = lambda _coordinator: False,
) -> None:
    """Wait until these devices have joined; the place of one that is lost meanwhile is free for another worker.

    Args:
        coordinator: where they join.
        names: of the devices.
        timeout_s: how long to wait for the last one.
        reporter: hears, again and again, how many have joined.
        tell: hears of each that comes or goes, and how to start it again.
        is_enough: says whether it is, without those that have not come for a minute; asked once a minute.

    Raises:
        PeerLostError: some did not come in time, or the worker of one that was started here has ended.
    """
    deadline_s, look_s = time.monotonic() + timeout_s, time.monotonic() + _BACK_S
    missing = list(names)
    while missing:
        if time.monotonic() > look_s:
            if is_enough(coordinator):
                tell(f"{', '.join(missing)} did not join within {_BACK_S:.0f} s: others hold all that the run needs")
                return
            look_s = time.monotonic() + _BACK_S
        for device, reason in coordinator.gone(names).items():
            command = coordinator.join_command(device)
            tell(f"Device {device} is gone: {reason}. It is waited for again: {command}")
        before, missing = missing, coordinator.missing(names, unlike=missing)
        for device in before:
            if device not in missing:
                tell(f"Device {device} has joined, {len(names) - len(missing)} of {len(names)}")
        reporter.progress(len(names) - len(missing), len(names), "workers joined")
        if missing and time.monotonic() > deadline_s:
            raise PeerLostError(
                f"{', '.join(missing)} did not join within {timeout_s:.0f} s; start there: "
                f"{coordinator.join_command(missing[0])}"
            )
