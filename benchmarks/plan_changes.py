"""What going over to another plan costs while a run goes on: `benchmarks/plan_changes.py [--rounds 3] [--no-network]`.

Four devices in a row, gpt2-tiny; plans take over by turns: other micro-batches (nothing moves), a unit to the
neighbour and back, all stages in the reverse order and back (everything moves). Printed are the seconds from the
verdict to the first action of the slowest device, and what went between devices. Beside it: the time that the bytes
take on the slowest link that some of them cross, were it alone.

Emulated: the devices of the laptop preset and, where namespaces are allowed, the network between its sites. Real: one
process for each device, all messages, the work of the change, on this machine's processors, which the processes share.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from results import save
from spantrain.app.profiling.describe import described_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import UnitGraph
from spantrain.models.catalog.catalog import resolve_model
from spantrain.runtime.coordinator.advice import Advice
from spantrain.testbed.testbed import why_unavailable

DEVICES = ("lab-0", "lab-1", "office-nx", "home-tx2")
BATCH = 16
OPTIMIZER_STATES = 2
"""Of AdamW, each as large as the parameter."""


def plan_of(
    cluster: Cluster, edges: Sequence[int], devices: Sequence[str] = DEVICES, size: int = 4, generation: int = 1
) -> Plan:
    """Return a row of stages."""
    spans = tuple(Span(span.lo, span.hi) for span in equal_spans(BATCH, size))
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=(Replica(devices=(name,), sample_share=1.0, in_flight_limit=BATCH),),
            micro_batches=spans,
        )
        for name, (first, end) in zip(devices, pairwise(edges), strict=True)
    )
    return Plan(
        cluster=cluster,
        model=resolve_model("gpt2-tiny"),
        global_batch=BATCH,
        dtype="float32",
        stages=stages,
        schedule="critical-path",
        generation=generation,
    )


@dataclass
class InTurn:
    """Advises one plan after another."""

    plans: list[tuple[str, Plan]]

    def advise(self, _step: int, _plan: Plan, _reports: object) -> Advice | None:
        """Return the next one, at once."""
        if not self.plans:
            return None
        name, plan = self.plans.pop(0)
        return Advice(plan=plan, reason=name)


def turns(cluster: Cluster, rounds: int) -> list[tuple[str, Plan]]:
    """Return what takes over, by name."""
    edges = (0, 4, 8, 11, 14)
    base = plan_of(cluster, edges)
    there_and_back = (
        ("other micro-batches", plan_of(cluster, edges, size=2)),
        ("other micro-batches", base),
        ("a unit to the neighbour", plan_of(cluster, (0, 4, 9, 11, 14))),
        ("a unit to the neighbour", base),
        ("everything", plan_of(cluster, edges, devices=DEVICES[::-1])),
        ("everything", base),
    )
    return [turn for _ in range(rounds) for turn in there_and_back]


def slowest_link_s(graph: UnitGraph, before: Plan, after: Plan) -> float:
    """Return the longest time that one link needs for what crosses it, each link alone."""
    sizes: dict[tuple[str, str], int] = {}
    for stage in after.stages:
        for unit in stage.units:
            (source,) = (old.devices[0] for old in before.stages if unit in old.units)
            pair = source, stage.devices[0]
            if pair[0] != pair[1]:
                sizes[pair] = sizes.get(pair, 0) + graph.units[unit].parameter_bytes * (1 + OPTIMIZER_STATES)
    links = ((after.cluster.link(*pair), size) for pair, size in sizes.items())
    return max((link.latency_s + size / link.bandwidth_bytes_per_s for link, size in links), default=0.0)


def run(rounds: int, network: bool, folder: Path) -> tuple[TrainOutcome, list[tuple[str, Plan]], UnitGraph]:
    """Train, with one plan after another."""
    cluster = load_preset("laptop")
    plans = turns(cluster, rounds)
    first = plans[1][1]
    profile = described_profile(cluster, first.model)
    request = TrainRequest(
        plan=first,
        profile=profile,
        profile_path="",
        job=TrainJob(steps=2 * len(plans) + 4),
        out=folder,
        checkpoints=False,
        adviser=InTurn(list(plans)),
    )
    options = SessionOptions(network=network)
    with open_session(cluster, DEVICES, options, folder / "logs", SilentReporter()) as session:
        outcome = train(session, request, StopRequest(), SilentReporter())
    return outcome, [("", first), *plans], profile.graph


def table_of(
    outcome: TrainOutcome, plans: Sequence[tuple[str, Plan]], graph: UnitGraph
) -> tuple[list[str], Mapping[str, object]]:
    """Return the lines to print, and the same as data."""
    links = {name: slowest_link_s(graph, before, after) for (_, before), (name, after) in pairwise(plans)}
    lines = [f"{'change':26}{'changes':>8}{'fastest':>10}{'median':>10}{'moved':>12}{'link alone':>12}"]
    data: dict[str, object] = {}
    for name, link_s in links.items():
        found = [change for change in outcome.plan_changes if change.reason == name]
        if not found:
            continue
        seconds = sorted(change.duration_s for change in found)
        moved = max(change.moved_bytes for change in found)
        middle_s = seconds[len(seconds) // 2]
        lines.append(
            f"{name:26}{len(found):>8}{seconds[0] * 1e3:>7.0f} ms{middle_s * 1e3:>7.0f} ms{moved / 1e6:>9.2f} MB"
            f"{link_s * 1e3:>9.0f} ms"
        )
        data[name] = {"duration_s": seconds, "moved_bytes": moved, "link_alone_s": link_s}
    lines.append(f"median step: {outcome.step_s_measured * 1e3:.0f} ms; {outcome.emulated}")
    lines.append(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    return lines, data


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-network", action="store_true")
    given = parser.parse_args()
    reason = why_unavailable()
    if reason is not None and not given.no_network:
        print(f"{reason}; going on with loopback, unshaped")
    with tempfile.TemporaryDirectory() as folder:
        outcome, plans, graph = run(given.rounds, reason is None and not given.no_network, Path(folder))
    lines, data = table_of(outcome, plans, graph)
    print("\n".join(lines))
    save("plan_changes", lines, {"changes": data, "emulated": outcome.emulated})


if __name__ == "__main__":
    main()
