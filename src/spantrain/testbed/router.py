"""The router process: builds the namespaces, holds them open, carries the packets. With it, everything goes.

Started as `python -m spantrain.testbed.router DIRECTORY` with a layout on standard input; answers one line on
standard output when all is ready. It forks one keeper, which waits for the router's end, however that comes, then ends
what still lives in the namespaces and removes the state files.
"""

import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from spantrain.config.files.json_codec import from_json
from spantrain.core.speed import SpeedTrace
from spantrain.errors import SpanTrainError, TestbedError, UsageError
from spantrain.testbed.build import Built, NetworkLayout, build, fine_timers
from spantrain.testbed.control import Answer, RequestServer, State, boot_id, mark_of
from spantrain.testbed.forwarding import Forwarder
from spantrain.testbed.namespace_processes import end_processes
from spantrain.testbed.shaper import ShapedLink

_FIRST_LEAD_S, _MAX_LEAD_S = 60e-6, 200e-6
_STEP_S = 2e-6
_PART = 0.9


class Lead:
    """How long before an instant to ask for the wake-up: what nine of ten wake-ups are late by, at most 0.2 ms.

    A sleeping process is woken late, by 20 to 100 microseconds and more where the processor had gone to sleep as well;
    a packet would cross two such delays on each way.
    """

    def __init__(self) -> None:
        self.seconds = _FIRST_LEAD_S

    def learn(self, late_s: float) -> None:
        """Take note of a wake-up that came so long after the time asked for.

        Steps up and down in the ratio of 9 to 1 rest where one wake-up in ten is later, however late that one is.
        """
        step_s = _PART * _STEP_S if late_s > self.seconds else (_PART - 1) * _STEP_S
        self.seconds = min(max(0.0, self.seconds + step_s), _MAX_LEAD_S)


def wait_until(due_s: float, fds: Sequence[int], lead: Lead) -> list[int]:
    """Return the files that can be read, at once if there are some, else at `due_s` on the monotonic clock."""
    asked_s = due_s - lead.seconds
    sleep_s = asked_s - time.monotonic()
    if sleep_s > 0:
        ready, _, _ = select.select(fds, (), (), sleep_s)
        if ready:
            return ready
        lead.learn(time.monotonic() - asked_s)
    while True:
        ready, _, _ = select.select(fds, (), (), 0)
        if ready or time.monotonic() >= due_s:
            return ready


_NICENESS = -10
"""A late router is a wrong network: it goes before the computation it serves, where the system allows that."""


class PacketRouter:
    """Serves packets and requests until asked to stop, or until its parent ends."""

    def __init__(self, layout: NetworkLayout, built: Built, control: RequestServer) -> None:
        self._forwarder = Forwarder(layout, built.tun_fds)
        self._control = control
        self._parent_fd = None if layout.parent_pid is None else os.pidfd_open(layout.parent_pid)
        self._started_s = time.monotonic()
        self._started_cpu_s = time.process_time()
        self._stopping = False

    def serve(self) -> None:
        """Run until the end."""
        forwarder, control = self._forwarder, self._control
        always = [*forwarder.fds, *([] if self._parent_fd is None else [self._parent_fd])]
        lead = Lead()
        while not self._stopping:
            for fd in wait_until(forwarder.due_s(), [*always, *control.fds], lead):
                if fd in forwarder.fds:
                    forwarder.read(fd)
                elif fd == self._parent_fd:
                    self._stopping = True
                elif (request := control.receive(fd)) is not None:
                    control.answer(request[0], self._obey(request[1]))
            forwarder.deliver()

    def _obey(self, request: Answer) -> Answer:
        operations: dict[str, Callable[..., Answer]] = {
            "status": self._status,
            "shape": self._shape,
            "shape_line": self._shape_line,
            "follow": self._follow,
            "cut": self._cut,
            "stop": self._stop,
        }
        operation = operations.get(request.pop("operation"))
        if operation is None:
            return {"error": f"operations are {', '.join(operations)}"}
        try:
            return operation(**request)
        except (TypeError, ValueError, UsageError) as error:
            return {"error": str(error)}

    def _stop(self) -> Answer:
        self._stopping = True
        return {}

    def _shape(self, *, source: str, target: str, changes: dict[str, Any]) -> Answer:
        known = self._forwarder.network.links
        link = known.get((source, target))
        if link is None:
            pairs = ", ".join(f"{a} -> {b}" for a, b in known)
            raise TestbedError(f"no link {source} -> {target}; there are {pairs or 'none'}")
        self._forwarder.reshape((source, target), replace(link.shape, **changes))
        return {}

    def _cut(self, *, ways: list[list[str]], is_cut: bool) -> Answer:
        network = self._forwarder.network
        pairs = {(source, target) for source, target in ways} & (network.links.keys() if is_cut else network.cut)
        network.cut = network.cut | pairs if is_cut else network.cut - pairs
        return {"ways": sorted(pairs)}

    def _shape_line(self, *, site: str, way: str, bandwidth_bytes_per_s: float) -> Answer:
        self._forwarder.network.reshape_line(time.monotonic(), (site, way), bandwidth_bytes_per_s)
        return {}

    def _follow(self, *, traces: dict[str, list[tuple[float, float]]], start_s: float | None) -> Answer:
        speeds = {name: SpeedTrace(changes=tuple((at, to) for at, to in rows)) for name, rows in traces.items()}
        now_s = time.monotonic()
        start_s = now_s if start_s is None else start_s
        self._forwarder.network.follow(now_s, speeds, start_s)
        return {"start_s": start_s}

    def _status(self) -> Answer:
        network = self._forwarder.network
        of_links_only = ("source", "target", "latency_s", "jitter_s", "loss_ratio", "packets_lost")
        lines = [
            {"site": site, "way": way}
            | {name: value for name, value in _figures(line).items() if name not in of_links_only}
            for (site, way), line in network.lines.items()
        ]
        return {
            "links": [_figures(link) | {"is_cut": pair in network.cut} for pair, link in network.links.items()],
            "lines": lines,
            "packets_refused": self._forwarder.packets_refused,
            "up_s": time.monotonic() - self._started_s,
            "router_cpu_s": time.process_time() - self._started_cpu_s,
        }


def _figures(carrier: ShapedLink) -> Answer:
    shape, counters = vars(carrier.shape), vars(carrier.counters)
    return {**shape, **counters, "speed": carrier.speed, "bytes_waiting": carrier.waiting_bytes}


def _write_state(directory: Path, layout: NetworkLayout, built: Built, keeper_pid: int) -> None:
    state = State(
        directory=str(directory),
        testbed_id=layout.testbed_id,
        cluster=layout.cluster,
        boot_id=boot_id(),
        router=mark_of(os.getpid()),
        keeper=mark_of(keeper_pid),
        owner=None if layout.parent_pid is None else mark_of(layout.parent_pid),
        has_user_namespace=built.has_user_namespace,
        site_of={host: site.name for site in layout.sites for host in site.hosts},
        address_of=layout.address_of,
        namespace_fd_of=built.host_fds,
        networks=tuple(built.networks.values()),
    )
    state.write()


def _start_keeper(directory: Path, layout: NetworkLayout, built: Built) -> int:
    """Fork what waits for the router's end, then clears up; return its process id.

    It holds the namespaces open, so that none is taken for another.
    """
    router_pid = os.getpid()
    keeper_pid = os.fork()
    if keeper_pid:
        return keeper_pid
    sys.stdout.close()
    os.close(1)
    for tun_fd in built.tun_fds:
        os.close(tun_fd)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(router_pid)], [], [])
    end_processes(set(built.networks.values()), spare=(os.getpid(),))
    for path in directory.glob(f"{layout.testbed_id}.*"):
        path.unlink(missing_ok=True)
    os._exit(0)


def _run(directory: Path, layout: NetworkLayout, *, probe: bool) -> None:
    built = build(layout)
    if probe:
        return
    control = RequestServer(directory / f"{layout.testbed_id}.sock")
    keeper_pid = _start_keeper(directory, layout, built)
    router = PacketRouter(layout, built, control)
    _write_state(directory, layout, built, keeper_pid)
    # Wake-ups are to be exact, and pauses rare.
    fine_timers()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    gc.collect()
    gc.freeze()
    gc.disable()  # the loop makes no cycles
    _reply({"ready": True})
    router.serve()


def _reply(answer: Answer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def main(arguments: list[str]) -> int:
    """Run the router; return its exit code."""
    directory, probe = Path(arguments[0]), arguments[1:] == ["--probe"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    layout = from_json(NetworkLayout, json.loads(sys.stdin.readline()), "layout", error=TestbedError, wire=True)
    try:
        _run(directory, layout, probe=probe)
    except SpanTrainError as error:
        _reply({"error": str(error)})
        return 1
    if probe:
        _reply({"ready": True})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
