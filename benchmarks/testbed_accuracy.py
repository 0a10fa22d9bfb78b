"""Print how close the testbed comes to what was asked: TCP rate, round trip, re-shaping, uplinks, its clock, its cost.

Real: the TCP stacks, sockets and packets of this machine's kernel. Emulated: rate, delay and queue between two sites.
Run: `python benchmarks/testbed_accuracy.py` as root, or where user namespaces and /dev/net/tun are allowed.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import permutations
from json import dumps
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.devices.emulated import PreciseClock
from spantrain.testbed.testbed import Testbed, why_unavailable
from spantrain_studies.testbed_traffic import Flow, Sample, measure_round_trips, rate_bytes_per_s

RATE_BOUND = 0.05
ROUND_TRIP_BOUND, ROUND_TRIP_BOUND_S = 0.1, 2e-3
BULK_PACKET_BYTES = 9000
"""A ping beside bulk may wait for one packet that is being sent already: nothing could spare it that."""
RESHAPE_BOUND_S = 1.0
CLOCK_WAITS, CLOCK_WAIT_S = 500, 2e-3
RATES_MBIT = (10, 50, 100, 500, 1000)
LATENCY_S = 0.025
WARM_UP_S, MEASURE_S = 1.3, 0.8
UDP_EACH_S, TCP_EACH_S = 0.6, 1.0
RUNS = 3
UPLINK_RATES_MBIT = (20, 100, 500)
SHARE_BOUND = 0.1
"""By how much of the smaller one's share two flows over one uplink may differ."""
SETTLED_RATIO, WINDOW_S = 0.1, 0.2
BYTES_PER_MBIT = 1e6 / 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found at one rate."""

    asked_mbit_per_s: float
    measured_mbit_per_s: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    round_trip_asked_s: float
    round_trip_s: float
    round_trip_under_load_s: float
    router_cpu_share: float
    reshape_to_half_s: float | None
    reshape_to_full_s: float | None
    reshape_to_half_tcp_s: float | None
    reshape_to_full_tcp_s: float | None


def two_sites() -> Cluster:
    """Return two sites with two hosts each, whose ports are faster than any link measured."""
    ends = (("a", "b"), ("b", "a"))
    return Cluster(
        name="two sites",
        kinds=(),
        devices=(),
        sites=tuple(
            Site(name=name, hosts=(f"{name}1", f"{name}2"), bandwidth_bytes_per_s=1.25e9, latency_s=0.0)
            for name in ("a", "b")
        ),
        hosts=tuple(Host(name=f"{site}{number}", site=site, devices=()) for site in ("a", "b") for number in (1, 2)),
        links=tuple(
            Link(source=source, target=target, bandwidth_bytes_per_s=1.25e6, latency_s=LATENCY_S)
            for source, target in ends
        ),
    )


@dataclass(frozen=True, kw_only=True)
class UplinkRow:
    """Two TCP connections from one site to two others, over links that are each twice as fast as its uplink."""

    asked_mbit_per_s: float
    alone_mbit_per_s: float
    """One of them, without the other."""
    together_mbit_per_s: float
    shares_apart: float
    """The larger share over the smaller one, less 1."""


def three_sites() -> Cluster:
    """Return a lab with two hosts and two other sites; rates are set while it runs."""
    hosts = {"lab": ("lab1", "lab2"), "office": ("office1",), "home": ("home1",)}
    return Cluster(
        name="three sites",
        kinds=(),
        devices=(),
        sites=tuple(
            Site(name=name, hosts=names, bandwidth_bytes_per_s=1.25e9, latency_s=0.0) for name, names in hosts.items()
        ),
        hosts=tuple(Host(name=name, site=site, devices=()) for site, names in hosts.items() for name in names),
        links=tuple(
            Link(source=source, target=target, bandwidth_bytes_per_s=1.25e6, latency_s=LATENCY_S)
            for source, target in permutations(hosts, 2)
        ),
    )


def measure_uplink(testbed: Testbed, mbit_per_s: float) -> UplinkRow:
    """Measure one connection over an uplink, then two to different sites; medians of some runs."""
    for target in ("office", "home"):
        testbed.shape("lab", target, bandwidth_bytes_per_s=2 * mbit_per_s * BYTES_PER_MBIT)
        testbed.shape(target, "lab", bandwidth_bytes_per_s=2 * mbit_per_s * BYTES_PER_MBIT)
    testbed.shape_site("lab", uplink_bandwidth_bytes_per_s=mbit_per_s * BYTES_PER_MBIT)
    pairs = (("lab1", "office1"), ("lab2", "home1"))
    alone = [rates_together(testbed, pairs[:1])[0] for _ in range(RUNS)]
    both = [rates_together(testbed, pairs) for _ in range(RUNS)]
    return UplinkRow(
        asked_mbit_per_s=mbit_per_s,
        alone_mbit_per_s=statistics.median(alone),
        together_mbit_per_s=statistics.median(sum(rates) for rates in both),
        shares_apart=statistics.median(max(rates) / min(rates) - 1 for rates in both),
    )


def rates_together(testbed: Testbed, pairs: tuple[tuple[str, str], ...]) -> list[float]:
    """Run a TCP connection for each pair at once; return their Mbit/s while all of them are there and settled."""
    flows = [Flow(testbed, *pair, duration_s=2 * WARM_UP_S + 2 * MEASURE_S) for pair in pairs]
    samples = [flow.finish() for flow in flows]
    start_s = max(found[0][0] for found in samples) + 2 * WARM_UP_S
    return [rate_bytes_per_s(found, start_s, start_s + MEASURE_S) / BYTES_PER_MBIT for found in samples]


def shape(testbed: Testbed, mbit_per_s: float) -> float:
    """Give both directions a rate; return when."""
    for source, target in (("a", "b"), ("b", "a")):
        testbed.shape(source, target, bandwidth_bytes_per_s=mbit_per_s * BYTES_PER_MBIT)
    return time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One connection."""

    mbit_per_s: float
    router_cpu_share: float
    round_trip_s: float
    """Of another pair of hosts meanwhile."""


def measure_rate(testbed: Testbed) -> Run:
    """Run one TCP connection, with a second pair of hosts pinging beside it once it has found its rate."""
    before = testbed.status()
    flow = Flow(testbed, "a1", "b1", duration_s=WARM_UP_S + MEASURE_S)
    time.sleep(WARM_UP_S)
    round_trip_s = statistics.median(measure_round_trips(testbed, "a2", "b2", count=8))
    samples = flow.finish()
    after = testbed.status()
    start_s = samples[0][0] + WARM_UP_S
    return Run(
        mbit_per_s=rate_bytes_per_s(samples, start_s, start_s + MEASURE_S) / BYTES_PER_MBIT,
        router_cpu_share=(after.router_cpu_s - before.router_cpu_s) / (after.up_s - before.up_s),
        round_trip_s=round_trip_s,
    )


def settled_after_s(samples: list[Sample], changed_s: float, until_s: float, mbit_per_s: float) -> float | None:
    """Return how long after a change the rate was within a tenth of what was asked, over a fifth of a second."""
    start_s = changed_s
    while start_s + WINDOW_S <= until_s:
        rate = rate_bytes_per_s(samples, start_s, start_s + WINDOW_S) / BYTES_PER_MBIT
        if abs(rate / mbit_per_s - 1) <= SETTLED_RATIO:
            return start_s + WINDOW_S - changed_s
        start_s += 0.01
    return None


def measure_reshape(testbed: Testbed, mbit_per_s: float, *, udp: bool) -> tuple[float | None, float | None]:
    """Halve the rate of a flow, then double it; return the time each took to show."""
    warm_up_s, each_s = (0.6, UDP_EACH_S) if udp else (WARM_UP_S, TCP_EACH_S)
    flood = 1.1 * mbit_per_s * BYTES_PER_MBIT if udp else None
    flow = Flow(testbed, "a1", "b1", duration_s=warm_up_s + 2 * each_s + 0.2, udp_bytes_per_s=flood)
    time.sleep(warm_up_s)
    halved_s = shape(testbed, mbit_per_s / 2)
    time.sleep(each_s)
    doubled_s = shape(testbed, mbit_per_s)
    time.sleep(each_s)
    samples = flow.finish()
    to_half_s = settled_after_s(samples, halved_s, doubled_s, mbit_per_s / 2)
    return to_half_s, settled_after_s(samples, doubled_s, doubled_s + each_s, mbit_per_s)


def measure(testbed: Testbed, mbit_per_s: float) -> Row:
    """Measure all there is at one rate."""
    shape(testbed, mbit_per_s)
    round_trip_s = statistics.median(measure_round_trips(testbed, "a1", "b1", count=9))
    runs = [measure_rate(testbed) for _ in range(RUNS)]
    rates = [run.mbit_per_s for run in runs]
    udp_half_s, udp_full_s = measure_reshape(testbed, mbit_per_s, udp=True)
    tcp_half_s, tcp_full_s = measure_reshape(testbed, mbit_per_s, udp=False)
    return Row(
        asked_mbit_per_s=mbit_per_s,
        measured_mbit_per_s=statistics.median(rates),
        ratio=statistics.median(rates) / mbit_per_s,
        ratio_lowest=min(rates) / mbit_per_s,
        ratio_highest=max(rates) / mbit_per_s,
        round_trip_asked_s=2 * LATENCY_S,
        round_trip_s=round_trip_s,
        round_trip_under_load_s=statistics.median(run.round_trip_s for run in runs),
        router_cpu_share=statistics.median(run.router_cpu_share for run in runs),
        reshape_to_half_s=udp_half_s,
        reshape_to_full_s=udp_full_s,
        reshape_to_half_tcp_s=tcp_half_s,
        reshape_to_full_tcp_s=tcp_full_s,
    )


def lateness_s() -> list[float]:
    """Return how late the clock of emulated devices was, shortest first."""
    clock = PreciseClock()
    late = []
    for _ in range(CLOCK_WAITS):
        deadline_s = clock.now_s() + CLOCK_WAIT_S
        clock.wait_until(deadline_s)
        late.append(clock.now_s() - deadline_s)
    return sorted(late)


def failures(rows: list[Row], uplinks: list[UplinkRow]) -> list[str]:
    """Return what is not within the bounds, in words."""
    found = []
    for uplink in uplinks:
        at = f"over an uplink of {uplink.asked_mbit_per_s:g} Mbit/s"
        for who, rate in (("one flow", uplink.alone_mbit_per_s), ("two flows", uplink.together_mbit_per_s)):
            if abs(rate / uplink.asked_mbit_per_s - 1) > RATE_BOUND:
                found.append(f"{at} {who} get {rate / uplink.asked_mbit_per_s:.3f} of it")
        if uplink.shares_apart > SHARE_BOUND:
            found.append(f"{at} the shares of two flows are {uplink.shares_apart:.0%} apart")
    for row in rows:
        at = f"at {row.asked_mbit_per_s:g} Mbit/s"
        bound_s = max(ROUND_TRIP_BOUND_S, ROUND_TRIP_BOUND * row.round_trip_asked_s)
        bulk_s = BULK_PACKET_BYTES / (row.asked_mbit_per_s * BYTES_PER_MBIT)
        if abs(row.ratio - 1) > RATE_BOUND:
            found.append(f"{at} the rate is {row.ratio:.3f} of it")
        if abs(row.round_trip_s - row.round_trip_asked_s) > bound_s:
            found.append(f"{at} a round trip takes {row.round_trip_s * 1e3:.1f} ms")
        if row.round_trip_under_load_s - row.round_trip_asked_s > bound_s + bulk_s:
            found.append(f"{at} a round trip beside bulk takes {row.round_trip_under_load_s * 1e3:.1f} ms")
        for name, took_s in (("lower", row.reshape_to_half_s), ("higher", row.reshape_to_full_s)):
            if took_s is None or took_s > RESHAPE_BOUND_S:
                found.append(f"{at} a {name} rate shows after {show(took_s)} ms")
    return found


def congestion_control() -> str:
    """Return the name of this machine's TCP congestion control."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


def show(took_s: float | None) -> str:
    """Return milliseconds, or that it took longer than was waited."""
    return f"> {TCP_EACH_S * 1e3:.0f}" if took_s is None else f"{took_s * 1e3:.0f}"


def render(rows: list[Row], took_s: float) -> None:
    """Print the table and what it means."""
    table = Table(
        "asked\nMbit/s", "TCP measured\nMbit/s", "ratio\n(lowest-highest)", "round trip ms\nasked", "idle",
        "under\nload", "router\nprocessor", "re-shape shows after\nms, half / full", "the same\nin TCP",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row.asked_mbit_per_s:g}",
            f"{row.measured_mbit_per_s:.1f}",
            f"{row.ratio:.3f} ({row.ratio_lowest:.3f}-{row.ratio_highest:.3f})",
            f"{row.round_trip_asked_s * 1e3:.1f}",
            f"{row.round_trip_s * 1e3:.1f}",
            f"{row.round_trip_under_load_s * 1e3:.1f}",
            f"{row.router_cpu_share:.1%}",
            f"{show(row.reshape_to_half_s)} / {show(row.reshape_to_full_s)}",
            f"{show(row.reshape_to_half_tcp_s)} / {show(row.reshape_to_full_tcp_s)}",
        )
    console = Console(width=130)
    console.print(table)
    console.print(
        f"One TCP connection over one direction, median of {RUNS} connections of {MEASURE_S:g} s each after "
        f"{WARM_UP_S:g} s; the rate counts payload, the shaper counts IP bytes. A re-shape shows when "
        f"{WINDOW_S * 1e3:.0f} ms of UDP payload are within {SETTLED_RATIO:.0%} of the new rate, that window included; "
        f"in TCP ({congestion_control()}), also the time its congestion control needs to find the new rate. "
        f"Under load: a second pair of hosts pings beside the bulk flow.\nReal: TCP, UDP, sockets, packets, kernel of "
        f"this machine ({os.cpu_count()} processors). Emulated: rate, delay and queue of the link. Took {took_s:.0f} s."
    )


def render_uplinks(rows: list[UplinkRow]) -> None:
    """Print what flows that share an uplink get."""
    table = Table("uplink asked\nMbit/s", "one flow\nMbit/s", "two flows\ntogether", "their shares\napart")
    for row in rows:
        table.add_row(
            f"{row.asked_mbit_per_s:g}",
            f"{row.alone_mbit_per_s:.1f}",
            f"{row.together_mbit_per_s:.1f}",
            f"{row.shares_apart:.1%}",
        )
    console = Console(width=130)
    console.print(table)
    console.print(
        f"TCP connections from two hosts of one site to two other sites, over links each twice as fast as its uplink; "
        f"medians of {RUNS} runs of {MEASURE_S:g} s each."
    )


def main() -> int:
    """Run all rates; return 1 if any is not within what the testbed promises."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--uplinks", action="store_true", help="only what flows that share an uplink get")
    arguments = parser.parse_args()
    if (reason := why_unavailable()) is not None:
        print(reason, file=sys.stderr)
        return 2
    start_s = time.monotonic()
    with Testbed.up(two_sites()) as testbed:
        rows = [] if arguments.uplinks else [measure(testbed, mbit_per_s) for mbit_per_s in RATES_MBIT]
    with Testbed.up(three_sites()) as testbed:
        uplinks = [measure_uplink(testbed, mbit_per_s) for mbit_per_s in UPLINK_RATES_MBIT]
    took_s = time.monotonic() - start_s
    late_s, wrong = lateness_s(), failures(rows, uplinks)
    clock = {"median_s": statistics.median(late_s), "p99_s": late_s[CLOCK_WAITS * 99 // 100]}
    if arguments.json:
        found = {"rows": [asdict(row) for row in rows], "uplinks": [asdict(row) for row in uplinks]}
        print(dumps({"took_s": took_s, **found, "clock_late": clock, "failures": wrong}))
    else:
        if rows:
            render(rows, took_s)
        render_uplinks(uplinks)
        print(
            f"The clock of emulated devices is late by {clock['median_s'] * 1e6:.0f} us in the median, "
            f"{clock['p99_s'] * 1e6:.0f} us in one of a hundred.\n"
            f"Bounds: rate {RATE_BOUND:.0%}; shares {SHARE_BOUND:.0%} apart; "
            "round trip, alone and beside bulk (and the packet it meets), "
            f"{ROUND_TRIP_BOUND_S * 1e3:g} ms or {ROUND_TRIP_BOUND:.0%}; re-shape {RESHAPE_BOUND_S:g} s: "
            + ("; ".join(wrong) or "all hold")
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
