"""How long sums over slow links take, and what the cost model says: `benchmarks/gradient_sums.py [--save]`.

Devices at a site each, equal links between all; each sums a tensor, one or several at once: by Gloo's own rings, as the
runtime does inside a site, and by ours (`runtime.gradients.rings`), as it does between sites. Both in turns in one run.
Real: processes, Gloo, TCP. Emulated: the links
(`spantrain.testbed`). The seconds are from the last start to the last end on any device, the least of a few; the
model's are those of `cost.sums` with the links as described, to which nothing was fitted. Needs root, or user
namespaces and /dev/net/tun.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from statistics import fmean, median

import torch
import torch.distributed as dist

from results import save
from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.cost.sums import Collectives, SumOptions, Words
from spantrain.runtime.gradients.members import TorchMembers
from spantrain.testbed.testbed import Testbed, why_unavailable

MIB, BYTES_PER_MBIT = 2**20, 125e3
REPEATS = 3
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Names of hosts cannot be looked up in the testbed, and need not be."""
PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Equal links between devices, and what is summed over them."""

    devices: int
    mbit_per_s: float
    latency_s: float
    sizes_mib: tuple[float, ...] = (0.001, 1.0, 8.0, 32.0)
    at_once: tuple[int, ...] = (1, 2)


CASES = (
    Case(devices=2, mbit_per_s=100, latency_s=0.02),
    Case(devices=3, mbit_per_s=100, latency_s=0.02),
    Case(devices=3, mbit_per_s=200, latency_s=0.04),
    Case(devices=2, mbit_per_s=500, latency_s=0.02),
    Case(devices=4, mbit_per_s=500, latency_s=0.02),
    Case(devices=3, mbit_per_s=100, latency_s=0.16, sizes_mib=(0.001, 8.0)),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sum, live and reckoned."""

    devices: int
    mbit_per_s: float
    latency_s: float
    size_mib: float
    at_once: int
    live_s: float
    model_s: float
    ours_s: float
    ours_model_s: float


class EqualWires:
    """Links that are all alike (`cost.sums.Wires`)."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def latency_s(self, source: str, target: str) -> float:  # noqa: ARG002 - all are alike
        """Return the seconds of the way."""
        return self._case.latency_s

    def busy_together_s(
        self, pairs: Sequence[tuple[str, str]], size_bytes: float, beside: Sequence[tuple[str, str]]
    ) -> list[float]:
        """Return the seconds of a message on links of their own."""
        assert not beside, "there is one ring"
        return [size_bytes / (self._case.mbit_per_s * BYTES_PER_MBIT)] * len(pairs)

    def place(self, device: str) -> tuple[str, str]:
        """Return where a device is: by itself."""
        return device, device


def cluster_of(case: Case) -> Cluster:
    """Return a site and a host for each device."""
    names = [f"s{number}" for number in range(case.devices)]
    rate = case.mbit_per_s * BYTES_PER_MBIT
    return Cluster(
        name="ring",
        kinds=(),
        devices=(),
        sites=tuple(
            Site(name=name, hosts=(f"h-{name}",), bandwidth_bytes_per_s=1.25e9, latency_s=0.0) for name in names
        ),
        hosts=tuple(Host(name=f"h-{name}", site=name, devices=()) for name in names),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=rate, latency_s=case.latency_s)
            for a, b in permutations(names, 2)
        ),
    )


def member(rank: int, count: int, address: str, port: int, sums: Sequence[tuple[int, int]]) -> list[list[float]]:
    """Sum tensors of these sizes, so many at once; return the seconds of each on all together, Gloo's and ours."""
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore(address, port, count, rank == 0, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=patience)
    dist.all_reduce(torch.zeros(MIB))
    assert dist.group.WORLD is not None
    ways = [TorchMembers(dist.group.WORLD, spread=spread) for spread in (False, True)]
    found = []
    for size_bytes, at_once in sums:
        moments = []
        for _ in range(REPEATS):
            for group in ways:
                tensors = [torch.ones(max(1, size_bytes // 4)) for _ in range(at_once)]
                dist.barrier()
                start_s = time.monotonic()
                for wait in [group.begin_all_reduce(tensor) for tensor in tensors]:
                    wait()
                moments.append((start_s, time.monotonic()))
                assert all(bool((tensor == count).all()) for tensor in tensors), "a sum"
        # One machine, one clock.
        latest = torch.tensor(moments, dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        seconds = latest[:, 1] - latest[:, 0]
        found.append([float(seconds[way :: len(ways)].min()) for way in range(len(ways))])
    for group in ways:
        group.close()
    dist.destroy_process_group()
    return found


def run(case: Case) -> list[Row]:
    """Sum over the links of a case."""
    sums = [(round(size * MIB), count) for count in case.at_once for size in case.sizes_mib]
    with Testbed.up(cluster_of(case)) as testbed:
        processes = []
        for rank in range(case.devices):
            host = f"h-s{rank}"
            order = [rank, case.devices, testbed.address("h-s0"), 29500, sums]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": testbed.interface(host), "OMP_NUM_THREADS": "1"} | QUIET
            command = [sys.executable, __file__, "--member", json.dumps(order)]
            processes.append(testbed.popen(host, command, env=environment, stdout=subprocess.PIPE))
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    collectives, names = Collectives(EqualWires(case)), [str(number) for number in range(case.devices)]
    rows = []
    for (size_bytes, at_once), (live_s, ours_s) in zip(sums, json.loads(said[0]), strict=True):
        gloos, ours = (
            collectives.seconds(names, size_bytes, options=SumOptions(words=words, at_once=at_once))
            for words in (Words.EACH, Words.FIRST)
        )
        rows.append(
            Row(
                devices=case.devices,
                mbit_per_s=case.mbit_per_s,
                latency_s=case.latency_s,
                size_mib=size_bytes / MIB,
                at_once=at_once,
                live_s=live_s,
                model_s=gloos,
                ours_s=ours_s,
                ours_model_s=ours,
            )
        )
    return rows


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--member", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        print(json.dumps(member(*json.loads(options.member))))
        return 0
    reason = why_unavailable()
    if reason is not None:
        parser.error(reason)
    rows: list[Row] = []
    ways = "".join(f" {whose:>8} {'model s':>8} {'off':>7}" for whose in ("Gloo s", "ours s"))
    table = [f"{'devices':>7} {'Mbit/s':>7} {'ms':>5} {'MiB':>8} {'at once':>7}{ways}"]
    print(table[0])
    for case in CASES:
        for row in run(case):
            rows.append(row)
            table.append(
                f"{row.devices:7} {row.mbit_per_s:7.0f} {1e3 * row.latency_s:5.0f} {row.size_mib:8.3f} {row.at_once:7} "
                f"{row.live_s:8.3f} {row.model_s:8.3f} {row.model_s / row.live_s - 1:+7.1%} "
                f"{row.ours_s:8.3f} {row.ours_model_s:8.3f} {row.ours_model_s / row.ours_s - 1:+7.1%}"
            )
            print(table[-1], flush=True)
    summary = [
        f"{whose}: {len(rows)} sums, off {fmean(off):.1%} in the mean, {max(off):.1%} at most"
        for whose, off in (
            ("Gloo's", [abs(row.model_s / row.live_s - 1) for row in rows]),
            ("ours", [abs(row.ours_model_s / row.ours_s - 1) for row in rows]),
        )
    ]
    ratios = [row.ours_s / row.live_s for row in rows]
    summary.append(f"ours take {median(ratios):.2f} of Gloo's seconds as the median, {max(ratios):.2f} at most")
    print("\n".join(summary))
    if options.save:
        save("gradient_sums", [*table, *summary], {"rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
