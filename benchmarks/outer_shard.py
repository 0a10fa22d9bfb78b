"""What a shard takes in, gives out, computes and holds: `benchmarks/outer_shard.py [--parts loopback shaped ...]`.

Five parts. `loopback`: pushes and pulls of one worker and two shards, encrypted and plain, beside ZeroMQ alone between
as many processes. `shaped`: the same over a link of 1 Gbit/s, as part of its rate, also with a model three times as
large: TCP takes a while to fill a line that was idle, here about 0.2 s. `ablation`: the master's schedule
(two workers and two shards on links of their own), the threads that copy, and copying beside the network, each on and
off. `update`: bytes that an update moves through memory, and the rate, beside that of a plain copy. `memory`: what is
resident over rounds with two workers, as a multiple of a shard's parameters in float32.

Emulated: the network of `shaped` and of the first rows of `ablation` (the testbed gives rate and delay), and the
master, which is this process: what it would say goes by pipes at once, so no round trip for control is in the figures.
Real: processes, shard servers, TCP, ZeroMQ, encryption, arithmetic, files.

A rate is bytes of tensors by seconds from the first command to move until the last layer is in its place, and measured.
Processor seconds, and pages of memory that the kernel had to make, are those of all processes, by the bytes that
moved; they say more than rates where others use the machine, too. Loopback rates need the machine to themselves.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from outer_shard_run import Conductor, Row, Start, a_layout, raw_rate, used_between
from results import save
from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.core.outer.commands import Combine, Commit, Measure, PushWeight, Restore, StageVersion
from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.outer.layers import ShardLayout
from spantrain.errors import TestbedError
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.shard.shard import OuterShard
from spantrain.outer.shard.snapshots import ShardVersion
from spantrain.testbed.testbed import Testbed
from spantrain.transport.layers.interface import LayerLimits
from spantrain_studies.outer.plain import MemorySnapshots

LINE_BYTES_PER_S = 125e6
LOOPBACK_BOUNDS = {True: 1e9, False: 2e9}
LARGE = 3
"""Times as many layers, of the second model of `shaped`."""
LINE_BOUND, MEMORY_BOUND, COPY_BOUND = 0.9, 5.5, 0.5


def middle(rows: Sequence[Row]) -> Row:
    """Return the median of each figure."""
    return {what: statistics.median(row[what] for row in rows) for what in rows[0]}


def measured(conductor: Conductor, way: TransferWay, runs: int, **how: Any) -> Row:
    """Move all layers some times, and once before; return medians: the rate, and what processes used by gigabyte."""
    size_bytes = conductor.layout.size_bytes * len(conductor.workers)
    found = []
    for _ in range(1 + runs):
        before = conductor.usage().values()
        seconds, tickets = conductor.move_all(way, **how)
        used = used_between(before, conductor.usage().values(), size_bytes)
        found.append({"bytes_per_s": size_bytes / seconds, **used})
        conductor.forget(tickets.values() if way is TransferWay.PUSH else ())
    return middle(found[1:])


def both_ways(conductor: Conductor, runs: int) -> Row:
    """Return the figures of pushes and of pulls."""
    conductor.seed()
    return {way.value: measured(conductor, way, runs) for way in TransferWay}


def loopback(layout: ShardLayout, runs: int) -> list[Row]:
    """Measure one worker and all shards on this machine, and ZeroMQ alone."""
    rows = []
    for encrypted in (True, False):
        raw = [
            raw_rate(len(layout.shards), layout.size_bytes, encrypted=encrypted, frame_bytes=LayerLimits().frame_bytes)
            for _ in range(runs)
        ]
        with Conductor(layout, ["a"], encrypted=encrypted) as conductor:
            row = both_ways(conductor, runs)
        rows.append({"encrypted": encrypted, "raw": middle(raw), **row})
    return rows


@contextmanager
def network(places: Sequence[str], rate_bytes_per_s: float, latency_s: float) -> Iterator[tuple[Start, Any] | None]:
    """Yield how to start a process in a place, and its address; None where there is no testbed.

    Each place is a site of its own, and what leaves it and what enters it is held to the rate.
    """
    sites = tuple(Site(name=n, hosts=(n,), bandwidth_bytes_per_s=1.25e9, latency_s=0.0) for n in places)
    hosts = tuple(Host(name=n, site=n, devices=()) for n in places)
    links = tuple(
        Link(source=a, target=b, bandwidth_bytes_per_s=rate_bytes_per_s, latency_s=latency_s)
        for a in places
        for b in places
        if a != b
    )
    cluster = Cluster(name="shard-benchmark", kinds=(), sites=sites, hosts=hosts, devices=(), links=links)
    try:
        testbed = Testbed.up(cluster)
    except TestbedError as error:
        print(f"no testbed here ({error}): left out")
        yield None
        return
    with testbed:
        yield testbed.popen, testbed.address


def shaped(layouts: Sequence[ShardLayout], runs: int, latency_s: float) -> list[Row]:
    """Measure over one link, with models of some sizes: all shards at its one end, the worker at the other.

    ZeroMQ alone goes the way of a push; it is measured with each size, since a line takes a while to get going.
    """
    rows: list[Row] = []
    with network(("servers", "cluster"), LINE_BYTES_PER_S, latency_s) as found:
        if not found:
            return rows
        start, address = found

        def place(name: str, argv: Sequence[str], **options: Any) -> Any:
            return start("servers" if name.startswith("s") else "cluster", argv, **options)

        how: dict[str, Any] = {"start": place, "address": lambda _: address("servers")}
        for layout, encrypted in product(layouts, (True, False)):
            frame_bytes, shards = LayerLimits().frame_bytes, len(layout.shards)
            raw = [
                raw_rate(shards, layout.size_bytes, encrypted=encrypted, frame_bytes=frame_bytes, **how)
                for _ in range(runs)
            ]
            with Conductor(layout, ["a"], encrypted=encrypted, **how) as conductor:
                row = both_ways(conductor, runs)
            rows.append({"encrypted": encrypted, "model_bytes": layout.size_bytes, "raw": middle(raw), **row})
    return rows


def ablation(layout: ShardLayout, runs: int, latency_s: float) -> list[Row]:
    """Measure each idea on and off, pushes only."""
    rows: list[Row] = []
    rate = LINE_BYTES_PER_S / 2
    with network(("s0", "s1", "a", "b"), rate, latency_s) as found:
        if found:
            with Conductor(layout, ["a", "b"], start=found[0], address=found[1]) as conductor:
                for scheduled in (True, False):
                    row = measured(conductor, TransferWay.PUSH, runs, scheduled=scheduled, slots=1)
                    rows.append({"idea": "schedule (2 workers, 2 shards, links)", "on": scheduled, **row})
                for slots in (2, 1):
                    row = measured(conductor, TransferWay.PUSH, runs, slots=slots)
                    rows.append({"idea": "next layer queued while one moves (links)", "on": slots == 2, **row})
    one_frame = LayerLimits(window_bytes=LayerLimits().frame_bytes)
    cases = (
        ("threads that copy (loopback, plain)", True, LayerLimits()),
        ("threads that copy (loopback, plain)", False, LayerLimits(copiers=0)),
        ("copying beside the network (loopback, plain)", True, LayerLimits()),
        ("copying beside the network (loopback, plain)", False, one_frame),
    )
    for idea, on, limits in cases:
        with Conductor(layout, ["a"], encrypted=False, limits=limits) as conductor:
            rows.append({"idea": idea, "on": on, **measured(conductor, TransferWay.PUSH, runs)})
    return rows


# In this process.


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of something."""
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def tensors_of(layout: ShardLayout, layer: int, value: float) -> dict[str, torch.Tensor]:
    """Return a layer of equal numbers."""
    return {one.name: torch.full(one.shape, value) for one in layout.layers[layer].parameters}


def update(layers: int, layer_mb: float, runs: int, *, pushes: int = 2) -> list[Row]:
    """Measure the steps of updates on one shard, and plain copies of as much, in turns.

    Bytes by number: taking a push reads 4; the mean reads 4 of each push and writes 4, its sum of squares reads 4; the
    step reads 12 and writes 8. A copy reads 4 and writes 4.
    """
    layout = a_layout(layers, layer_mb, 1)
    count = layout.size_bytes // 4
    shard = OuterShard("s0", layout, snapshots=MemorySnapshots([_begun(layout)]))
    shard.on_command(Restore(shard="s0", source=1, version=1, reason="the benchmark"))
    found, target = torch.ones(count), torch.zeros(count)
    moved = {"take": 4.0 * pushes, "combine": 4.0 * pushes + 8, "step": 20.0, "copy": 8.0}
    seconds: dict[str, list[float]] = {name: [] for name in moved}
    for k in range(1 + runs):
        for name, took in one_update(shard, layout, k, pushes).items():
            seconds[name].append(took)
        seconds["copy"].append(timed(lambda: target.copy_(found)))
    return [
        {
            "step": name,
            "bytes_moved": moved[name] * count,
            "bytes_per_s": moved[name] * count / statistics.median(took[1:]),
        }
        for name, took in seconds.items()
    ]


def _begun(layout: ShardLayout) -> ShardVersion:
    first = {name: one for k in range(len(layout.layers)) for name, one in tensors_of(layout, k, 1.0).items()}
    still = {name: torch.zeros_like(one) for name, one in first.items()}
    return ShardVersion(version=1, parameters=first, state={"velocity": still})


def one_update(shard: OuterShard, layout: ShardLayout, number: int, pushes: int) -> dict[str, float]:
    """Do one update; return the seconds of its steps."""
    why, own = "the benchmark", Ticket(2, number)
    tickets = tuple(Ticket(1, number * pushes + k) for k in range(pushes))
    layers = {t: {k: tensors_of(layout, k, 0.1) for k in range(len(layout.layers))} for t in tickets}

    def take() -> None:
        for ticket in tickets:
            for k in range(len(layout.layers)):
                shard.take(ticket, k, layers[ticket].pop(k))

    weights = tuple(PushWeight(push=ticket, part=1 / pushes) for ticket in tickets)
    stage = StageVersion(shard="s0", update=own, version=2 + number, scale=0.5, parameters=None, reason=why)
    took = {"take": timed(take)}
    shard.on_command(Measure(shard="s0", update=own, pushes=tickets, reason=why))
    combine = Combine(shard="s0", update=own, weights=weights, reason=why)
    took["combine"] = timed(lambda: shard.on_command(combine))
    took["step"] = timed(lambda: shard.on_command(stage))
    shard.on_command(Commit(shard="s0", version=2 + number, update=own, keep=(), reason=why))
    return took


def memory(layout: ShardLayout, runs: int) -> list[Row]:
    """Do rounds of two workers: both push, an update, both pull; return what each shard held at most.

    Counted against the bound is the most that was resident, less what the process had before the first layer came, and
    less the buffers: the pushes of both workers, and a window of frames for each layer that the master lets a shard
    take at once. Memory that the allocator keeps is counted.
    """
    rows = []
    frames_bytes = OuterSettings().shard_slots * LayerLimits().window_bytes
    with Conductor(layout, ["a", "b"]) as conductor:
        before = conductor.usage(layout.shards)
        conductor.seed()
        for _ in range(runs):
            _, tickets = conductor.move_all(TransferWay.PUSH)
            conductor.update(list(tickets.values()))
            conductor.move_all(TransferWay.PULL)
        after = conductor.usage(layout.shards)
    for name in layout.shards:
        own_bytes = sum(layout.layers[k].size_bytes for k in layout.layers_of(name))
        buffer_bytes = 2 * own_bytes + frames_bytes
        most_bytes = after[name]["most_bytes"] - before[name]["resident_bytes"]
        row = {"shard": name, "parameter_bytes": own_bytes, "most_bytes": most_bytes, "buffer_bytes": buffer_bytes}
        rows.append({**row, "with_buffers": most_bytes / own_bytes, "times": (most_bytes - buffer_bytes) / own_bytes})
    return rows


# Tables.


def told_rate(figures: Row, over: float = 0.0) -> str:
    """Return a rate, and its part of another, in words."""
    part = f" = {figures['bytes_per_s'] / over:5.3f} of the line" if over else ""
    return f"{figures['bytes_per_s'] / 1e9:6.3f} GB/s{part} ({figures['cpu_s_per_gb']:.2f} CPU s/GB)"


def verdict(what: str, held: bool) -> str:
    """Return a bound, and whether it was held."""
    return f"bound: {what}: {'held' if held else 'NOT HELD'}"


def loopback_table(rows: Sequence[Row]) -> list[str]:
    """Return the part's lines."""
    lines = []
    for row in rows:
        name, bound = "curve" if row["encrypted"] else "plain", LOOPBACK_BOUNDS[row["encrypted"]]
        least = min(row[way.value]["bytes_per_s"] for way in TransferWay)
        for way in TransferWay:
            times = row[way.value]["cpu_s_per_gb"] / row["raw"]["cpu_s_per_gb"]
            lines.append(
                f"loopback {name} {way.value}: {told_rate(row[way.value])}, {times:.2f} times ZeroMQ's processor time, "
                f"{row[way.value]['pages_per_gb']:.0f} new pages/GB"
            )
        lines.append(f"loopback {name} ZeroMQ alone: {told_rate(row['raw'])}")
        lines.append(verdict(f"at least {bound / 1e9:.0f} GB/s {name}", least >= bound))
    return lines


def shaped_table(rows: Sequence[Row]) -> list[str]:
    """Return the part's lines."""
    lines = []
    for row in rows:
        name = f"1 Gbit/s {'curve' if row['encrypted'] else 'plain'}, {row['model_bytes'] / 1e6:.0f} MB"
        lines += [f"{name}: {way.value} {told_rate(row[way.value], LINE_BYTES_PER_S)}" for way in TransferWay]
        lines.append(f"{name}: ZeroMQ alone {told_rate(row['raw'], LINE_BYTES_PER_S)}")
        least = min(row[way.value]["bytes_per_s"] for way in TransferWay) / LINE_BYTES_PER_S
        lines.append(verdict(f"at least {LINE_BOUND:.0%} of the line", least >= LINE_BOUND))
    return lines


def ablation_table(rows: Sequence[Row]) -> list[str]:
    """Return the part's lines."""
    return [f"{row['idea']:<45} {'on ' if row['on'] else 'off'} push {told_rate(row)}" for row in rows]


def update_table(rows: Sequence[Row]) -> list[str]:
    """Return the part's lines."""
    copy = next(row["bytes_per_s"] for row in rows if row["step"] == "copy")
    lines = [
        f"update, {row['step']:<8} {row['bytes_moved'] / 1e6:8.0f} MB moved, {row['bytes_per_s'] / 1e9:6.2f} GB/s, "
        f"{row['bytes_per_s'] / copy:5.2f} of a copy's"
        for row in rows
    ]
    step = next(row["bytes_per_s"] for row in rows if row["step"] == "step")
    return [*lines, verdict(f"the step at least {COPY_BOUND:.0%} of a copy's rate", step >= COPY_BOUND * copy)]


def memory_table(rows: Sequence[Row]) -> list[str]:
    """Return the part's lines."""
    lines = [
        f"memory of {row['shard']}: {row['parameter_bytes'] / 1e6:.0f} MB of parameters, at most "
        f"{row['with_buffers']:.2f} times that resident; {row['times']:.2f} times without "
        f"{row['buffer_bytes'] / 1e6:.0f} MB of buffers (two pushes; frames under way)"
        for row in rows
    ]
    held = all(row["times"] <= MEMORY_BOUND for row in rows)
    return [*lines, verdict(f"at most {MEMORY_BOUND} times the parameters in float32 plus buffers", held)]


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ("loopback", "shaped", "ablation", "update", "memory")
    parser.add_argument("--parts", nargs="+", choices=every, default=every)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer-mb", type=float, default=16.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=10.0, help="one way, of shaped links")
    parser.add_argument("--no-save", action="store_true")
    told = parser.parse_args()
    torch.set_num_threads(1)
    layout, large = (a_layout(times * told.layers, told.layer_mb, 2) for times in (1, LARGE))
    latency_s = told.latency_ms / 1000
    parts: dict[str, tuple[Callable[[], list[Row]], Callable[[Sequence[Row]], list[str]]]] = {
        "loopback": (lambda: loopback(layout, told.runs), loopback_table),
        "shaped": (lambda: shaped((layout, large), told.runs, latency_s), shaped_table),
        "ablation": (lambda: ablation(layout, told.runs, latency_s), ablation_table),
        "update": (lambda: update(told.layers, told.layer_mb, told.runs), update_table),
        "memory": (lambda: memory(layout, max(2, told.runs)), memory_table),
    }
    head = (
        f"{told.layers} layers of {told.layer_mb:g} MB on 2 shards, median of {told.runs} runs, {told.latency_ms:g} ms"
    )
    table, data = [head], {"emulated": __doc__, "layers": told.layers, "layer_mb": told.layer_mb, "runs": told.runs}
    print(head)
    for name in told.parts:
        work, render = parts[name]
        data[name] = work()
        lines = render(data[name]) if data[name] else [f"{name}: left out"]
        print("\n".join(lines), flush=True)
        table += lines
    if not told.no_save:
        save("outer_shard", table, data)


if __name__ == "__main__":
    main()
