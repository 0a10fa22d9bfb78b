"""How fast the simulator is: `benchmarks/simulator_speed.py [--repeats 5] [--quick]`.

Processor seconds to simulate one step, set-up included, without a trace: 8 stages of one device and 64 micro-batches
(bound 20 ms), 512 devices and 64 micro-batches (bound 3 s; also with transfers that take two shared ports each), the
program's memory (bound 500 MB), and the time per action as steps grow (bound: at most 1.5 times from the least to the
most, since growth should be linear in actions).

Nothing is emulated; costs come from a table, equal stages. The least of the repeats is compared, since other programs
on the machine only ever add time; the mean is shown beside it.
"""

import argparse
import gc
import os
import resource
import statistics
import time
from dataclasses import dataclass, replace

from spantrain.core.action import Direction, Op
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.cost.held_sizes import HeldBytes, HeldSizes
from spantrain.schedule.registry import schedule_names
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.transfers import TransferCost

BOUND_SMALL_S, BOUND_LARGE_S, BOUND_BYTES, BOUND_GROWTH = 20e-3, 3.0, 500e6, 1.5
SECONDS = {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline of equal stages."""

    stages: int
    replicas: int
    micro_batches: int

    def plan(self) -> Plan:
        """Return the plan; each replica has a sample of every micro-batch."""
        names = [[f"s{stage}r{replica}" for replica in range(self.replicas)] for stage in range(self.stages)]
        everyone = tuple(name for row in names for name in row)
        kind = DeviceKind(
            name="equal",
            peak_fp16_flop_per_s=1.0,
            peak_fp32_flop_per_s=1.0,
            memory_bytes=1,
            memory_bandwidth_bytes_per_s=1.0,
            power_w=1.0,
            source="made up",
        )
        cluster = Cluster(
            name="made up",
            kinds=(kind,),
            sites=(Site(name="here", hosts=("one",), bandwidth_bytes_per_s=1.0, latency_s=0.0),),
            hosts=(Host(name="one", site="here", devices=everyone),),
            devices=tuple(
                Device(name=name, kind="equal", host="one", site="here", backend="emulated", memory_bytes=1)
                for name in everyone
            ),
            links=(),
        )
        batch = self.micro_batches * self.replicas
        spans = equal_spans(batch, self.replicas)
        stages = tuple(
            Stage(
                first_unit=index,
                end_unit=index + 1,
                replicas=tuple(
                    Replica(devices=(name,), sample_share=1.0, in_flight_limit=self.micro_batches) for name in row
                ),
                micro_batches=spans,
            )
            for index, row in enumerate(names)
        )
        model = ModelSpec(name="none", family="gpt2", config={}, dataset="stdlib-text")
        return Plan(
            cluster=cluster, model=model, global_batch=batch, dtype="float32", stages=stages, schedule="critical-path"
        )

    def port_costs(self) -> "PortCosts":
        """Return the same, with a stage's devices on one host, whose port all their traffic shares."""
        cut = (0.5,) * (self.stages - 1)
        return PortCosts(
            sample_s=(SECONDS,) * self.stages,
            latency_s=cut,
            forward_s=(0.5 / self.replicas,) * (self.stages - 1),
            backward_s=(0.5 / self.replicas,) * (self.stages - 1),
        )

    def costs(self) -> TableCosts:
        """Return equal seconds everywhere, transfers of half a forward and as much latency."""
        cut = (0.5,) * (self.stages - 1)
        return TableCosts(sample_s=(SECONDS,) * self.stages, latency_s=cut, forward_s=cut, backward_s=cut)


class PortCosts(TableCosts):
    """Each transfer takes the port of its sender's host and that of its receiver's."""

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return what it takes to send a span."""
        alone = super().transfer(source, target, direction, stage, span)
        hosts = (stage, stage + 1) if direction is Direction.FORWARD else (stage, stage - 1)
        return replace(alone, links=(f"{hosts[0]} out", f"{hosts[1]} in"))


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a case took."""

    least_s: float
    mean_s: float
    actions: int

    @property
    def per_action_s(self) -> float:
        """Seconds for an action, in the least run."""
        return self.least_s / self.actions


def timed(case: Case, schedule: str, repeats: int, *, memory: bool = False, ports: bool = False) -> Timed:
    """Simulate one step a few times."""
    plan, costs = case.plan(), case.port_costs() if ports else case.costs()
    sizes = {
        device: _sizes(first=stage == plan.stages[0], last=stage == plan.stages[-1])
        for stage in plan.stages
        for device in (stage.devices if memory else ())
    }
    options = SimulationOptions(trace=False, held_sizes=sizes)
    seconds, actions = [], 0
    for _ in range(repeats):
        gc.collect()
        started_s = time.process_time()
        result = simulate(replace(plan, schedule=schedule), costs, steps=1, options=options)
        seconds.append(time.process_time() - started_s)
        actions = sum(len(order) for order in result.orders.values())
    return Timed(least_s=min(seconds), mean_s=statistics.fmean(seconds), actions=actions)


def _sizes(*, first: bool, last: bool) -> HeldSizes:
    return HeldSizes(
        always=HeldBytes(parameter_bytes=1, gradient_bytes=1, optimizer_bytes=1, framework_bytes=1),
        activation_bytes_per_sample=1,
        input_bytes_per_sample=0 if first else 1,
        output_gradient_bytes_per_sample=0 if last else 1,
    )


def show(what: str, entry: Timed, bound_s: float | None = None) -> bool:
    """Print a line; return whether the bound holds."""
    verdict = "" if bound_s is None else f"  bound {bound_s:g} s: {'holds' if entry.least_s < bound_s else 'MISSED'}"
    print(
        f"{what:58} {entry.actions:7} actions  least {entry.least_s * 1e3:8.1f} ms  mean {entry.mean_s * 1e3:8.1f} ms  "
        f"{entry.per_action_s * 1e6:5.1f} us an action{verdict}"
    )
    return bound_s is None or entry.least_s < bound_s


def growth(repeats: int) -> bool:
    """Print the time per action for steps of different sizes; return whether it grows as little as it should."""
    per_action = []
    for stages, count in ((4, 32), (8, 64), (8, 256), (32, 64), (32, 256)):
        entry = timed(Case(stages=stages, replicas=1, micro_batches=count), "critical-path", repeats)
        show(f"{stages} stages, {count} micro-batches", entry)
        per_action.append(entry.per_action_s)
    ratio = max(per_action) / min(per_action)
    print(f"time per action, largest over smallest: {ratio:.2f}  bound {BOUND_GROWTH}: {_holds(ratio < BOUND_GROWTH)}")
    return ratio < BOUND_GROWTH


def _holds(yes: bool) -> str:
    return "holds" if yes else "MISSED"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="leave out the 512 devices")
    options = parser.parse_args()
    small = Case(stages=8, replicas=1, micro_batches=64)
    held = [
        show(f"8 stages, 64 micro-batches, {name}", timed(small, name, options.repeats), BOUND_SMALL_S)
        for name in schedule_names()
    ]
    show("  with memory over time, critical-path", timed(small, "critical-path", options.repeats, memory=True))
    held.append(growth(options.repeats))
    if not options.quick:
        for stages, replicas, ports in ((64, 8, False), (64, 8, True), (512, 1, False)):
            case = Case(stages=stages, replicas=replicas, micro_batches=64)
            entry = timed(case, "critical-path", max(1, options.repeats // 3), ports=ports)
            where = ", a host a stage" if ports else ""
            held.append(show(f"{stages} stages of {replicas}, 64 micro-batches{where}", entry, BOUND_LARGE_S))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held.append(peak_bytes < BOUND_BYTES)
    print(f"memory of the program: {peak_bytes / 1e6:.0f} MB  bound {BOUND_BYTES / 1e6:g} MB: {_holds(held[-1])}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if not all(held):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
