"""A plan whose pipelines are alike, simulated as one pipeline of each sort.

Where every stage has as many replicas with equal shares, the k-th replica only ever talks to the k-th ones of its
neighbours: the plan is so many pipelines, which meet in the gradient sums. Pipelines of the same kinds of devices, over
links that are as fast and as full, do the same at the same time, so one of each sort is run. That is exact where
pipelines share no link that is too narrow for them. Where they do, all of a sort are taken to send at the same time:
the one that is run has the part of the link that each of them would get. What the end of a step takes is the whole
plan's, as always. In large plans micro-batches need not divide evenly: then each pipeline is taken to have as many
samples of each as the one that has most, which is what the end of the step waits for.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from spantrain.core.action import Direction
from spantrain.core.plan import Plan, Stage
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.sim.costs import ChangedTransfers, ProfileCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.transfers import TransferCost

_DIGITS = 9
_EVEN_UP_TO = 4_000
"""Micro-batches of replicas up to which only pipelines are folded that have as many samples of each."""
_FOLDED_FROM = 2
"""Pipelines of a sort, on average, from which on folding is worth its while."""


class _Fold(Record):
    """One pipeline of each sort, and who is like whom."""

    plan: Plan
    costs: ChangedTransfers
    """The whole plan's, with links as full as all pipelines of a sort make them."""
    alike: tuple[tuple[int, ...], ...]
    """Numbers of the pipelines of each sort; the first one is run."""


def _sent_by_all(transfer: TransferCost, loads: Sequence[float]) -> TransferCost:
    """Return what a transfer takes when all pipelines of its sort send: their loads are those of its links."""
    occupancy_s = transfer.occupancy_s * max(1.0, *loads)
    return replace(transfer, occupancy_s=occupancy_s, usage=tuple(min(1.0, load) for load in loads))


def simulate_whole(plan: Plan, costs: ProfileCosts) -> SimulationResult:
    """Run one step of a plan, which stands for all, folded if it can be.

    `orders` and `peak_in_flight` are then of the pipelines that were run alone.

    Raises:
        PlanError: an in-flight limit is too small for a static order.
        ScheduleError: the pipeline stops.
    """
    options = SimulationOptions(trace=False)
    folded = fold(plan, costs)
    if folded is None:
        return simulate(plan, costs, steps=1, options=options)
    result = simulate(folded.plan, folded.costs, steps=1, options=options)
    who = {
        name: [stage.replicas[number].devices[member] for number in row]
        for stage in plan.stages
        for row in folded.alike
        for member, name in enumerate(stage.replicas[row[0]].devices)
    }
    leaders = {stage.replicas[row[0]].devices[0]: row for stage in plan.stages for row in folded.alike}
    stage_of = {replica.devices[0]: stage for stage in plan.stages for replica in stage.replicas}
    return replace(
        result,
        samples_per_s=plan.global_batch / result.step_s,
        bubble_ratio={name: ratio for one, ratio in result.bubble_ratio.items() for name in who[one]},
        utilisation={name: ratio for one, ratio in result.utilisation.items() for name in who[one]},
        link_bytes={
            (stage_of[source].replicas[number].devices[0], stage_of[target].replicas[number].devices[0]): size_bytes
            for (source, target), size_bytes in result.link_bytes.items()
            for number in leaders[source]
        },
    )


def fold(plan: Plan, costs: ProfileCosts) -> _Fold | None:
    """Return one pipeline of each sort; None for a plan that is not made of pipelines that are alike."""
    width = len(plan.stages[0].replicas)
    if width < _FOLDED_FROM or plan.interleaved or plan.hints is not None:
        return None
    if not all(_even(stage, plan) for stage in plan.stages):
        return None
    flows = _flows(plan, costs)
    alike: dict[tuple[object, ...], list[int]] = {}
    for number in range(width):
        alike.setdefault(_looks(plan, flows, number), []).append(number)
    sorts: dict[tuple[object, ...], list[int]] = {}
    loads_of: dict[int, list[tuple[float, ...]]] = {}
    for looks, row in alike.items():
        for number, loads in zip(row, _loads(row, flows), strict=True):
            loads_of[number] = loads
            rounded = tuple(tuple(round(load, _DIGITS) for load in own) for own in loads)
            sorts.setdefault((looks, rounded), []).append(number)
    if len(sorts) * _FOLDED_FROM > width:
        return None
    first = [row[0] for row in sorts.values()]
    full = {row[n][0]: loads for n in first for row, loads in zip(flows, loads_of[n], strict=True)}
    return _Fold(
        plan=_narrowed(plan, first, width),
        costs=ChangedTransfers(costs, lambda source, target, alone: _sent_by_all(alone, full[source, target])),
        alike=tuple(map(tuple, sorts.values())),
    )


def _loads(numbers: Sequence[int], flows: list[list["_Flow"]]) -> list[list[tuple[float, ...]]]:
    """Return, for each of some pipelines and each flow, how full its links are if all of these send at once."""
    found: list[list[tuple[float, ...]]] = [[] for _ in numbers]
    for row in flows:
        full: dict[str, float] = {}
        for number in numbers:
            for name, part in row[number][1].uses:
                full[name] = full.get(name, 0.0) + part
        for own, number in zip(found, numbers, strict=True):
            own.append(tuple(full[name] for name, _ in row[number][1].uses))
    return found


def _even(stage: Stage, plan: Plan) -> bool:
    """Whether a stage's replicas have as many samples of each micro-batch, the same ones as in the first stage."""
    width = len(plan.stages[0].replicas)
    large = width * len(stage.micro_batches) * len(plan.stages) > _EVEN_UP_TO
    return (
        len(stage.replicas) == width
        and stage.micro_batches == plan.stages[0].micro_batches
        and len({replica.sample_share for replica in stage.replicas}) == 1
        and (large or all(span.size % width == 0 for span in stage.micro_batches))
    )


_Flow = tuple[tuple[str, str], TransferCost]


def _flows(plan: Plan, costs: ProfileCosts) -> list[list[_Flow]]:
    """Return for each cut and direction the message of a first micro-batch in every pipeline."""
    found: list[list[_Flow]] = []
    for lower, (here, there) in enumerate(pairwise(plan.stages)):
        ways = ((Direction.FORWARD, lower, here, there), (Direction.BACKWARD, lower + 1, there, here))
        for direction, index, sender, receiver in ways:
            row = []
            for number, replica in enumerate(sender.replicas):
                pair = (replica.devices[0], receiver.replicas[number].devices[0])
                row.append((pair, costs.transfer(*pair, direction, index, Span(0, sender.sizes_by_replica[number][0]))))
            found.append(row)
    return found


def _looks(plan: Plan, flows: list[list[_Flow]], number: int) -> tuple[object, ...]:
    """Return what tells a pipeline from others, but for the names of devices, sites and links."""
    devices, sites = plan.cluster.device_by_name, dict[str, int]()
    stages = tuple(
        (
            tuple((devices[name].kind, sites.setdefault(devices[name].site, len(sites))) for name in replica.devices),
            replica.tp_shares,
            replica.in_flight_limit,
        )
        for replica in (stage.replicas[number] for stage in plan.stages)
    )
    ways = tuple(
        (
            round(transfer.latency_s, _DIGITS),
            round(transfer.occupancy_s, _DIGITS),
            tuple(round(part, _DIGITS) for _, part in transfer.uses),
        )
        for transfer in (row[number][1] for row in flows)
    )
    return stages, ways


def _narrowed(plan: Plan, numbers: list[int], width: int) -> Plan:
    """Return the plan with these replicas only, each with the samples that it had."""
    ends = [0, *accumulate(-(-span.size // width) * len(numbers) for span in plan.stages[0].micro_batches)]
    spans = tuple(Span(*pair) for pair in pairwise(ends))
    return replace(
        plan,
        global_batch=ends[-1],
        stages=tuple(
            replace(stage, replicas=tuple(stage.replicas[number] for number in numbers), micro_batches=spans)
            for stage in plan.stages
        ),
    )
