"""The testbed as its users see it: bring it up, run commands on its hosts, change its links, take it down."""

import json
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.config.files.problems import did_you_mean
from spantrain.core.cluster import Cluster, Host, Site
from spantrain.core.speed import SpeedTrace
from spantrain.errors import TestbedError
from spantrain.testbed import control
from spantrain.testbed.build import HOST_INTERFACE, NetworkLayout, lay_out
from spantrain.testbed.namespace_handle import NamespaceHandle
from spantrain.testbed.namespace_processes import end_process, end_processes

_MARK = "SPANTRAIN_TESTBED"
_GRACE_S = 3.0
_END_TIMEOUT_S = 60.0


class Testbed(AbstractContextManager["Testbed"]):
    """A running emulated network. As a context manager it goes down at the end."""

    __test__ = False

    def __init__(self, state: control.State, router: "subprocess.Popen[str] | None" = None) -> None:
        self._state = state
        self._router = router
        self.id = state.testbed_id
        """Name of this testbed, unlike any other's."""

    @classmethod
    def up(cls, cluster: Cluster, *, detached: bool = False) -> "Testbed":
        """Build the sites, hosts and links of a cluster.

        Args:
            cluster: What to emulate.
            detached: Leave it running when this process ends.

        Raises:
            TestbedError: It cannot be built here, or not from this cluster; the message says what is missing.
        """
        layout = lay_out(cluster, testbed_id=secrets.token_hex(4), parent_pid=None if detached else os.getpid())
        router = _start_router(layout)
        state = next((state for state in control.read_states() if state.testbed_id == layout.testbed_id), None)
        if state is None:
            raise TestbedError(f"testbed {layout.testbed_id} ended as soon as it was up")
        return cls(state, router)

    @classmethod
    def attach(cls, testbed_id: str | None = None) -> "Testbed":
        """Return a handle on a testbed that runs already: the named one, or the only one.

        Those that running programs use for themselves count only if there is no other.

        Raises:
            TestbedError: There is none, or there are several and none was named.
        """
        running = {state.testbed_id: state for state in control.read_states() if state.running}
        if testbed_id is not None:
            return cls(running[_known("testbed", testbed_id, running)])
        if not running:
            raise TestbedError("no testbed is running; start one with `spantrain testbed up --preset laptop`")
        running = {name: state for name, state in running.items() if not state.in_use} or running
        if len(running) > 1:
            raise TestbedError(f"{len(running)} testbeds are running ({', '.join(running)}); name one with --id")
        return cls(next(iter(running.values())))

    def address(self, host: str) -> str:
        """Return the IPv4 address of a host; it exists only inside the testbed."""
        return self._state.address_of[_known("host", host, self._state.address_of)]

    def interface(self, host: str) -> str:
        """Return the name of a host's network interface, for programs that must be told (Gloo)."""
        _known("host", host, self._state.address_of)
        return HOST_INTERFACE

    def namespace(self, host: str) -> NamespaceHandle:
        """Return what a child process needs in order to move itself to a host."""
        return NamespaceHandle(
            host=host,
            router_pid=self._state.router.pid,
            router_started=self._state.router.started,
            namespace_fd=self._state.namespace_fd_of[_known("host", host, self._state.namespace_fd_of)],
            has_user_namespace=self._state.has_user_namespace,
        )

    def popen(self, host: str, argv: Sequence[str], **popen_args: Any) -> "subprocess.Popen[bytes]":
        """Start a command on a host; it is ended when the testbed goes.

        Args:
            host: Where.
            argv: Command and arguments; a command that does not exist ends with code 127.
            popen_args: For `subprocess.Popen`; not `shell`, `executable` or `preexec_fn`.
        """
        for name in ("shell", "executable", "preexec_fn"):
            if popen_args.get(name):
                raise ValueError(f"popen on host {host}: {name} does not work here")
        environment = {**(popen_args.pop("env", None) or os.environ), _MARK: self.id}
        return subprocess.Popen(self.namespace(host).command(list(argv)), env=environment, **popen_args)

    def shape(
        self,
        source: str,
        target: str,
        *,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float | None = None,
        jitter_s: float | None = None,
        loss_ratio: float | None = None,
    ) -> None:
        """Change one direction between two sites, now; what is None stays as it is.

        Raises:
            TestbedError: No such sites, no link between them, or a value that no link can have.
        """
        sites = sorted(set(self._state.site_of.values()))
        _known("site", source, sites)
        _known("site", target, sites)
        shape = (bandwidth_bytes_per_s, latency_s, jitter_s, loss_ratio)
        names = ("bandwidth_bytes_per_s", "latency_s", "jitter_s", "loss_ratio")
        changes = {name: value for name, value in zip(names, shape, strict=True) if value is not None}
        control.ask(self._state.file("sock"), "shape", source=source, target=target, changes=changes)

    def shape_site(
        self,
        site: str,
        *,
        uplink_bandwidth_bytes_per_s: float | None = None,
        downlink_bandwidth_bytes_per_s: float | None = None,
    ) -> None:
        """Change what all that leaves a site, or comes to it, shares, now; what is None stays as it is.

        A site that had no such line has one from now on.

        Raises:
            TestbedError: No such site, or a rate that no line can have.
        """
        _known("site", site, sorted(set(self._state.site_of.values())))
        wanted = {"up": uplink_bandwidth_bytes_per_s, "down": downlink_bandwidth_bytes_per_s}
        rates = {way: rate for way, rate in wanted.items() if rate is not None}
        for way, rate in rates.items():
            if not 0 < rate < math.inf:
                raise TestbedError(f"site {site}: {way}link must be positive and finite, got {rate} bytes/s")
        for way, rate in rates.items():
            control.ask(self._state.file("sock"), "shape_line", site=site, way=way, bandwidth_bytes_per_s=rate)

    def cut(self, *sites: str, is_cut: bool = True) -> tuple[tuple[str, str], ...]:
        """Let nothing pass between two sites, one and all others, or all (none named); or again what did before.

        What was under way still arrives. Returns the ways by source and target that are cut, or were.

        Raises:
            TestbedError: No such site, twice the same, or nothing between them; or the testbed is gone.
        """
        known = sorted(set(self._state.site_of.values()))
        for site in sites:
            _known("site", site, known)
        if len(set(sites)) < len(sites) or len(sites) > 2:
            raise TestbedError(f"{' and '.join(sites)}: name two sites, or one that is cut off from all others")
        ends = set(sites)
        ways = [(a, b) for a in known for b in known if a != b and ends <= {a, b}]
        found = control.ask(self._state.file("sock"), "cut", ways=ways, is_cut=is_cut)["ways"]
        if is_cut and not found:
            raise TestbedError(f"no link between {' and '.join(sites) or 'sites'} to cut")
        return tuple((source, target) for source, target in found)

    def follow(self, traces: Mapping[str, SpeedTrace], *, start_s: float | None = None) -> float:
        """Let links and lines have other speeds over time, instead of any traces before; return when they begin.

        Args:
            traces: By way between two sites (`lab->office`) or line of a site (`lab up`); the others have their
                normal speed. None at all ends what is followed.
            start_s: When they begin, on this machine's monotonic clock; None: now.

        Raises:
            TestbedError: No such link or line, or the testbed is gone.
        """
        rows = {name: trace.changes for name, trace in traces.items()}
        return float(control.ask(self._state.file("sock"), "follow", traces=rows, start_s=start_s)["start_s"])

    @property
    def links(self) -> tuple[str, ...]:
        """Names of all that may follow a trace: ways between sites, and the lines that sites have.

        Raises:
            TestbedError: The testbed is gone.
        """
        found = self.status()
        ways = (f"{link.source}->{link.target}" for link in found.links)
        return (*ways, *(f"{line.site} {line.way}" for line in found.lines))

    def hosts_of(self, place: str) -> tuple[str, ...]:
        """Return the hosts of a site, or the one host of that name.

        Raises:
            TestbedError: there is no such site or host.
        """
        found = tuple(host for host, site in self._state.site_of.items() if place in (host, site))
        return found or (_known("site or host", place, (*self._state.site_of.values(), *self._state.site_of)),)

    def status(self) -> control.TestbedStatus:
        """Return the present shapes and counters.

        Raises:
            TestbedError: The testbed is gone.
        """
        state = self._state
        hosts = [
            {"host": host, "site": site, "address": state.address_of[host], "interface": HOST_INTERFACE}
            for host, site in state.site_of.items()
        ]
        own = {"id": state.testbed_id, "cluster": state.cluster, "hosts": hosts}
        answer = control.ask(state.file("sock"), "status")
        return from_json(control.TestbedStatus, own | answer, "status", error=TestbedError, wire=True)

    def down(self) -> None:
        """End every process inside, then the network; return when nothing is left. Harmless when it is gone."""
        _take_down(self._state)
        if self._router is not None:
            self._router.wait(_END_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self.down()


def down_all() -> tuple[str, ...]:
    """Take down every testbed of this user, what crashed ones left included; return their names.

    Those that running programs use for themselves are left alone: they go with their programs, or by name.
    """
    states = [state for state in control.read_states() if not state.in_use]
    for state in states:
        _take_down(state)
    return tuple(state.testbed_id for state in states)


def why_unavailable() -> str | None:
    """Return why no testbed can be built here, or None; it is tried, with one host in one site."""
    site = Site(name="probe", hosts=("probe",), bandwidth_bytes_per_s=1e8, latency_s=0.0)
    host = Host(name="probe", site="probe", devices=())
    cluster = Cluster(name="probe", kinds=(), sites=(site,), hosts=(host,), devices=(), links=())
    try:
        router = _start_router(lay_out(cluster, testbed_id=secrets.token_hex(4), parent_pid=None), "--probe")
    except TestbedError as error:
        return str(error)
    router.wait(_END_TIMEOUT_S)
    return None


def _start_router(layout: NetworkLayout, *options: str) -> "subprocess.Popen[str]":
    if sys.platform != "linux":
        raise TestbedError(f"a testbed needs Linux, this is {sys.platform}; use --no-network")
    directory = control.runtime_dir()
    log = directory / f"{layout.testbed_id}.log"
    with log.open("wb") as errors:
        router = subprocess.Popen(
            [sys.executable, "-m", "spantrain.testbed.router", str(directory), *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, cwd="/",
        )  # fmt: skip
    assert router.stdin is not None
    assert router.stdout is not None
    with router.stdin, router.stdout:
        router.stdin.write(json.dumps(to_json(layout, wire=True)) + "\n")
        router.stdin.flush()
        line = router.stdout.readline()
    said = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    answer = json.loads(line) if line else {"error": f"its router failed: {said or 'without a word'}"}
    if options or "error" in answer:
        log.unlink(missing_ok=True)
    if "error" in answer:
        router.wait(_END_TIMEOUT_S)
        raise TestbedError(
            f"no testbed can be built here: {answer['error']}; --no-network runs without one, on loopback"
        )
    return router


def _take_down(state: control.State) -> None:
    spare = (os.getpid(), state.router.pid, state.keeper.pid)
    same_boot = state.boot_id == control.boot_id()
    if same_boot and (state.router.alive or state.keeper.alive):
        end_processes(state.networks, spare=spare)
        if state.running:
            grace_s = _GRACE_S
            try:
                control.ask(state.file("sock"), "stop")
            except TestbedError:
                grace_s = 0.0
            end_process(state.router.pid, grace_s=grace_s)
        if state.keeper.alive:
            end_process(state.keeper.pid, grace_s=2 * _GRACE_S)
    elif same_boot:
        # Router and keeper were both killed, so the namespaces may be others' by now: the mark must match as well.
        end_processes(state.networks, spare=spare, mark=f"{_MARK}={state.testbed_id}")
    state.remove()


def _known(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    if name not in names:
        raise TestbedError(f"no {what} {name!r}; {did_you_mean(name, names)}")
    return name
