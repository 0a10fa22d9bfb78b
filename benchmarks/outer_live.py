"""The same cases as in the simulator, run by processes on the testbed: what `--live` of two benchmarks does.

Each cluster is a site of its own with the line that the case gives it; master and shards are hosts of a hub that has a
line for each shard. Everything is a thousandth as large and ten times as quick as at full size (`LIVE_SCALE`), so that
an exchange takes as many steps. Real: messages, TCP, encryption of `outer`, sums, updates. Emulated: the network, and
inner steps, in which a process sleeps: that an exchange slows a cluster's own computing down is not seen here.
"""

import contextlib
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

from outer_cases import FAST_LINE_GBIT, GBIT, Scale
from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.errors import WorkerError
from spantrain.testbed.testbed import Testbed
from spantrain_studies.outer.case import ClusterFigures, MemberLine, OuterCase, OuterResult
from spantrain_studies.outer.methods import METHODS

LIVE_SCALE = Scale(bytes_part=1e-3, seconds_part=0.1)
TORCHFT = "torchft-diloco"
_MEMBER = Path(__file__).parent / "outer_live_member.py"
_HUB, _MASTER, _PORT, _LIGHTHOUSE_PORT = "hub", "master", 29500, 29510
_START_S, _END_S = 180.0, 120.0
_INSIDE_BYTES_PER_S = 1e9


def live_methods() -> tuple[str, ...]:
    """Return the methods that can run here; say which cannot."""
    if importlib.util.find_spec("torchft") is not None and lighthouse() is not None:
        return (*METHODS, TORCHFT)
    print(f"left out: {TORCHFT}: the package torchft (0.2 was tried) and its torchft_lighthouse are not installed here")
    return METHODS


def lighthouse() -> str | None:
    """Return torchft's program for the quorum, beside this Python."""
    return shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def measure_live(method: str, case: OuterCase) -> OuterResult:
    """Run a case once, for its seconds.

    Raises:
        TestbedError: there is no emulated network here.
        WorkerError: a process failed.
    """
    assert case.seconds is not None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spantrain-live-")))
        testbed = stack.enter_context(Testbed.up(network_of(case)))
        processes = stack.enter_context(Processes(testbed, folder))
        joining = start_servers(method, case, testbed, processes, folder)
        for rank, cluster in enumerate(case.clusters):
            order = {
                "role": "cluster", "method": method, "name": cluster.name, "rank": rank, "step_s": cluster.step_s,
                "clusters": len(case.clusters), "inner_steps": case.inner_steps, "seconds": case.seconds,
                "model_bytes": case.model_bytes, "layers": len(case.layers), "tokens_per_step": case.tokens_per_step,
                "interface": testbed.interface(cluster.name), "address": testbed.address(cluster.name),
                "store": f"{testbed.address(case.clusters[0].name)}:{_PORT}", **joining,
            }  # fmt: skip
            processes.start(cluster.name, order)
        names = [cluster.name for cluster in case.clusters]
        for name in names:
            processes.read(name, _START_S)
        for name in names:
            processes.write(name, "go")
        said = {name: processes.read(name, case.seconds + _END_S) for name in names}
    return result_of(method, case, said)


def start_servers(
    method: str, case: OuterCase, testbed: Testbed, processes: "Processes", folder: Path
) -> Mapping[str, Any]:
    """Start what a method needs beside its clusters; return what to tell these."""
    address = testbed.address(_MASTER)
    if method == TORCHFT:
        program = lighthouse()
        assert program is not None
        words = [program, "--bind", f"{address}:{_LIGHTHOUSE_PORT}", "--min_replicas", str(len(case.clusters)),
                 "--join_timeout_ms", "60000"]  # fmt: skip
        processes.run(_MASTER, words)
        return {"lighthouse": f"http://{address}:{_LIGHTHOUSE_PORT}"}
    if method != "outer":
        return {}
    shards = [shard.name for shard in case.shards]
    order = {"role": "master", "bind": f"{address}:{_PORT}", "folder": str(folder / _MASTER), "shards": shards}
    processes.start(_MASTER, {**order, "grace_s": case.settings.grace_s})
    heard = processes.read(_MASTER, _START_S)
    joining = {"master": heard["address"], "token": heard["token"]}
    for name in shards:
        place = {"address": testbed.address(name), "folder": str(folder / name), "name": name}
        processes.start(name, {"role": "shard", **place, **joining})
    for name in shards:
        processes.read(name, _START_S)
    return joining


def network_of(case: OuterCase) -> Cluster:
    """Return a site for each cluster, and one for master and shards; pairs of clusters have a link as well."""
    hosts_of = {_HUB: (_MASTER, *(shard.name for shard in case.shards))}
    hosts_of |= {cluster.name: (cluster.name,) for cluster in case.clusters}
    part = LIVE_SCALE.bandwidth_part
    hub = MemberLine(
        bandwidth_bytes_per_s=FAST_LINE_GBIT * GBIT * part * len(case.shards), latency_s=case.shards[0].line.latency_s
    )
    lines = {_HUB: hub, **{cluster.name: cluster.line for cluster in case.clusters}}

    def link(source: str, target: str) -> Link:
        ends = lines[source], lines[target]
        return Link(
            source=source,
            target=target,
            bandwidth_bytes_per_s=min(end.bandwidth_bytes_per_s for end in ends),
            latency_s=sum(end.latency_s for end in ends),
        )

    return Cluster(
        name="outer-live",
        kinds=(),
        sites=tuple(
            Site(
                name=site, hosts=hosts, bandwidth_bytes_per_s=_INSIDE_BYTES_PER_S, latency_s=1e-5,
                uplink_bandwidth_bytes_per_s=lines[site].bandwidth_bytes_per_s,
                downlink_bandwidth_bytes_per_s=lines[site].bandwidth_bytes_per_s,
            )
            for site, hosts in hosts_of.items()
        ),
        hosts=tuple(Host(name=host, site=site, devices=()) for site, hosts in hosts_of.items() for host in hosts),
        devices=(),
        links=tuple(link(*pair) for pair in permutations(hosts_of, 2)),
    )  # fmt: skip


class Processes:
    """Processes on hosts, each of which has its own name; all end with this."""

    def __init__(self, testbed: Testbed, folder: Path) -> None:
        self._testbed, self._folder = testbed, folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def start(self, host: str, order: Mapping[str, Any]) -> None:
        """Start a member."""
        self.run(host, [sys.executable, str(_MEMBER)])
        self.write(host, json.dumps(order))

    def run(self, host: str, words: list[str]) -> None:
        """Start a program."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self._folder / f"{host}.log").open("ab") as log:
            self._running[host] = self._testbed.popen(
                host, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )

    def write(self, host: str, line: str) -> None:
        """Give a process a line."""
        stdin = self._running[host].stdin
        assert stdin is not None
        stdin.write(line.encode() + b"\n")
        stdin.flush()

    def read(self, host: str, timeout_s: float) -> dict[str, Any]:
        """Return the next line of a process.

        Raises:
            WorkerError: there was none.
        """
        stdout = self._running[host].stdout
        assert stdout is not None
        line = _line(stdout.fileno(), timeout_s)
        if line is None:
            log = (self._folder / f"{host}.log").read_text(errors="replace")[-2000:]
            raise WorkerError(f"{host} said nothing for {timeout_s:.0f} s, or ended; the end of its log:\n{log}")
        found: dict[str, Any] = json.loads(line)
        return found


def _line(file: int, timeout_s: float) -> bytes | None:
    """Read a line, byte by byte, so that nothing of the next one is taken."""
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([file], [], [], timeout_s)
        more = os.read(file, 1) if ready else b""
        if not more:
            return None
        line += more
    return line


def result_of(method: str, case: OuterCase, said: Mapping[str, Mapping[str, Any]]) -> OuterResult:
    """Return what clusters said as the simulator would.

    Each ends with a step of its own, a slow one up to a second later than the others; so its rate is over its own time,
    and the span is that in which all together have done so many tokens at these rates.
    """
    steps = sum(one["steps"] for one in said.values())
    span_s = steps / sum(one["steps"] / one["span_s"] for one in said.values())
    figures = {
        name: ClusterFigures(
            tokens=one["steps"] * case.tokens_per_step,
            tokens_counted=0,
            tokens_lost=0,
            inner_steps=one["steps"],
            outer_rounds=one["rounds"],
            mean_staleness=0.0,
            comm_s=one["comm_s"],
            train_s=one["train_s"],
            stood_still_s=max(0.0, one["span_s"] - one["train_s"]),
        )
        for name, one in said.items()
    }
    return OuterResult(
        method=method,
        clusters=figures,
        versions=0,
        rejected_updates=0,
        span_s=span_s,
        end_s=max(one["span_s"] for one in said.values()),
        ideal_tokens_per_s=sum(case.tokens_per_step / one.mean_step_s for one in case.clusters),
    )
