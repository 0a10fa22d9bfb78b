"""`zorse`: stages of devices that talk fast, of any kinds and numbers (Guo et al., Zorse, arXiv 2507.10392, 2025).

Written from the paper and the steps that its published planner takes. Kept: devices are grouped by the links between
them, for every number of groups; each group is a stage and divides micro-batches by what its devices get done, as many
of them as there are, of unlike kinds; groups come along the pipeline with the fastest inside first, then always the one
that talks fastest with the last; gradients and optimizer state are divided among a stage's devices (ZeRO-2); layers by
what the groups get done; an estimate of filling, slowest stage and sums; all devices are used. Interleaved stages, with
degrees as they fit.

Decided here: groups by average linkage in the place of a minimum cut; cuts that make the slowest stage fastest, within
memory, in the place of rounding proportions; state is divided only where whole state does not do better. Interleaved
stages hold whole state here, as plans have it, and get the order of work of `interleaved`, in its favour. Not kept:
parameters that wait in the host's memory, whole micro-batches for each device in the place of parts of each.
"""

from collections.abc import Iterator

from spantrain.core.plan import SumModel
from spantrain.core.shares import StateSharding
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.request import JobSpec, PlanRequest, Proposal
from spantrain.planner.strategies.interleaved import interleavings
from spantrain_studies.planners.assembler import PaperAssembler
from spantrain_studies.planners.asymmetric.graph import DeviceGraph, Devices
from spantrain_studies.planners.asymmetric.stages import MAX_STAGES, Crew, CrewCosts, Option, graph_within

_BUILT = 12
"""Pipelines, best by the estimate, that plans are made of."""
_SUM_PASSES = 2.0
"""Gradients are scattered to who updates them, and parameters gathered."""


def zorse(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the groupings that Zorse's estimate likes best, and interleaved forms of them.

    Raises:
        InfeasiblePlanError: none fits, or there are too many devices.
    """
    assembler = PaperAssembler(request, SumModel.TORCH_FSDP)
    graph, costs = graph_within(request, assembler), CrewCosts(assembler)
    options = sorted(_options(graph, costs, assembler.units), key=lambda option: option.latency_s)
    if not options:
        raise InfeasiblePlanError(f"no grouping of all {len(graph.devices)} devices has layers that fit")
    found = assembler.best(((one.shapes, one.size, one.latency_s) for one in options[:_BUILT]), "1f1b")
    if request.job.schedule != JobSpec.schedule or not request.constraints.interleaving:
        return found
    return (*found, *interleavings((one.plan for one in found), request))


def _options(graph: DeviceGraph, costs: CrewCosts, units: int) -> Iterator[Option]:
    """Yield every number of groups, with whole state and with state that is divided, for each size of micro-batch."""
    for number, groups in graph.groupings().items():
        if number > min(units, MAX_STAGES):
            continue
        order = graph.chain(groups, max(groups, key=graph.least_inside))
        for sharding in (StateSharding.NONE, StateSharding.ZERO2):
            if sharding is StateSharding.NONE or any(len(group) > 1 for group in order):
                crews = [_crew(group, costs, sharding) for group in order]
                yield from costs.options(crews, graph, _SUM_PASSES)


def _crew(group: Devices, costs: CrewCosts, sharding: StateSharding) -> Crew:
    groups = tuple((name,) for name in group)
    kept = sharding if len(group) > 1 else StateSharding.NONE
    return Crew(groups=groups, shares=tuple(map(costs.speed, groups)), sharding=kept)
