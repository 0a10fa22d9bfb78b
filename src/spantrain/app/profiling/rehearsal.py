"""What the runtime itself costs: a few steps of a small model, one micro-batch each, on the workers that will train.

With one micro-batch nothing overlaps, so what lies between two pieces of work is the runtime's: on one device, between
an action and the next; between two devices, after the link's own time is taken off; between two steps, the barrier and
the update. Emulated devices are slowed so that their real computation hides in the emulated time.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from spantrain.app.session import Session
from spantrain.core.action import Action, Op
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import LinkMeasurement, RuntimeCosts
from spantrain.core.span import Span
from spantrain.core.trace import Interval, Trace
from spantrain.core.units import UnitGraph
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph
from spantrain.runtime.checkpoint.coordinator_files import CoordinatorFiles
from spantrain.runtime.control.orders import TrainOrder
from spantrain.runtime.coordinator.barrier import StepBarrier
from spantrain.runtime.step.emulation import emulated_seconds

_MODEL = "gpt2-tiny"
_SAMPLES = 4
_STEPS = 6
_WARM_UP_STEPS = 1
_MAX_DEVICES = 4
_UNIT_SPEED = 1e-3
_SLOWEST_FORWARD_S = 30e-3
"""Emulated; its real computation takes a fraction of that."""
_NEXT_S = 3e-3
"""An action that starts so soon after another has not waited for a message."""

Seconds = Callable[[str, Action], float | None]
"""(device, action) -> what it is to take there; None: as long as it takes."""


def rehearse(session: Session, links: Iterable[LinkMeasurement]) -> RuntimeCosts | None:
    """Run the rehearsal; None with fewer than two devices, which send each other nothing.

    Raises:
        WorkerError, PeerLostError: a device failed or was lost.
    """
    # Of the sites with most devices first: between sites, links take most of a rehearsal.
    site_of = {name: session.cluster.device_by_name[name].site for name in session.devices}
    sites = [site for site, _ in Counter(site_of.values()).most_common()]
    devices = tuple(sorted(session.devices, key=lambda name: sites.index(site_of[name]))[:_MAX_DEVICES])
    if len(devices) < 2:
        return None
    graph = build_graph(resolve_model(_MODEL))
    plan = rehearsal_plan(session.cluster, devices, graph)
    job = TrainJob(steps=_STEPS, trace_steps=_STEPS, adapter="off", batch_norm="frozen")
    barrier = StepBarrier(
        plan=plan, job=job, stop_requested=lambda: False, on_step=lambda _outcome: None, can_checkpoint=False
    )
    order = TrainOrder(plan=plan, graph=graph, job=job, peers=session.coordinator.peers(devices), output_dir="")
    nothing = CoordinatorFiles(Path(), takes=False, tell=lambda _text: None)
    answers = session.coordinator.train(dict.fromkeys(devices, order), barrier, nothing, should_abort=lambda: False)
    results = [answers[name] for name in devices]
    trace = Trace.joined([result.trace for result in results], "wall")
    link_by_pair = {(link.source, link.target): link for link in links}
    return costs_from(trace, plan, graph, link_by_pair)


def costs_from(
    trace: Trace, plan: Plan, graph: UnitGraph, link_by_pair: Mapping[tuple[str, str], LinkMeasurement]
) -> RuntimeCosts:
    """Return the runtime's costs from the trace of a plan of single devices with one micro-batch.

    Clocks of two devices may differ by a little; going up and down a link that cancels out.
    """
    work = {name: [i for i in trace.of(name) if i.step >= _WARM_UP_STEPS] for name in plan.devices}
    seconds = _emulated_seconds(plan, graph)
    # The mean of the middle half: the rest is what other programs of the machine do now and then.
    between_s = sorted(value for name in plan.devices for value in _between(work[name], partial(seconds, name)))
    cut = len(between_s) // 4
    next_s = statistics.fmean(between_s[cut : len(between_s) - cut]) if between_s else 0.0
    hops_s = [
        (_hop_s(work[a], work[b], Op.FORWARD) + _hop_s(work[b], work[a], Op.BACKWARD_INPUT)) / 2
        - _link_s(graph, plan.stages[number], link_by_pair[a, b], link_by_pair[b, a])
        for number, (a, b) in enumerate(pairwise(plan.devices))
    ]
    action_s = max(0.0, next_s)
    return RuntimeCosts(
        action_s=action_s, message_s=max(0.0, statistics.median(hops_s) - action_s), step_end_s=_step_end_s(work)
    )


def rehearsal_plan(cluster: Cluster, devices: Sequence[str], graph: UnitGraph) -> Plan:
    """Return the small model cut evenly over the devices, at a speed that lets real computation hide."""
    units = len(graph.units)
    edges = [round(units * number / len(devices)) for number in range(len(devices) + 1)]
    whole = (Span(0, _SAMPLES),)
    plan = Plan(
        cluster=replace(cluster, emulated_speed=_UNIT_SPEED),
        model=resolve_model(_MODEL),
        global_batch=_SAMPLES,
        dtype="float32",
        stages=tuple(
            Stage(
                first_unit=first,
                end_unit=end,
                replicas=(Replica(devices=(name,), sample_share=1.0, in_flight_limit=_SAMPLES),),
                micro_batches=whole,
            )
            for name, (first, end) in zip(devices, pairwise(edges), strict=True)
        ),
        schedule="critical-path",
    )
    seconds = _emulated_seconds(plan, graph)
    forwards = [seconds(name, Action(number, Op.FORWARD, whole[0])) or 0.0 for number, name in enumerate(devices)]
    if not max(forwards):
        return plan
    return replace(plan, cluster=replace(cluster, emulated_speed=_UNIT_SPEED * max(forwards) / _SLOWEST_FORWARD_S))


def _emulated_seconds(plan: Plan, graph: UnitGraph) -> Seconds:
    by_device = {
        stage.devices[0]: emulated_seconds(
            plan.cluster, stage.devices[0], plan.dtype, [graph.units[i] for i in stage.units]
        )
        for stage in plan.stages
    }
    return lambda device, action: by_device[device](action.op, action.span.size)


def _between(intervals: Sequence[Interval], seconds: Callable[[Action], float | None]) -> Iterator[float]:
    """Yield what passes from the end of an action to that of the next one besides the next one's own time."""
    for before, after in pairwise(intervals):
        if after.step == before.step and after.start_s - before.end_s <= _NEXT_S and after.action is not None:
            own_s = seconds(after.action)
            # An emulated device makes up for a late start, so what counts is when work ends.
            yield after.end_s - before.end_s - (after.duration_s if own_s is None else own_s)


def _hop_s(source: Sequence[Interval], target: Sequence[Interval], op: Op) -> float:
    """Return the seconds from the end of the work that makes a message to the start of that which takes it."""
    takers = (op,) if op is Op.FORWARD else (op, Op.BACKWARD)
    ended = {i.step: i.end_s for i in source if i.action and i.action.op is op}
    started = {i.step: i.start_s for i in target if i.action and i.action.op in takers}
    return statistics.median(started[step] - ended[step] for step in ended)


def _link_s(graph: UnitGraph, stage: Stage, up: LinkMeasurement, down: LinkMeasurement) -> float:
    """Return the mean of both directions' seconds on the link behind a stage."""
    unit = graph.units[stage.end_unit - 1]
    sizes = (unit.cut_bytes_per_sample * _SAMPLES, unit.gradient_bytes_per_sample * _SAMPLES)
    return sum(link.latency_s + link.busy_seconds(size) for link, size in zip((up, down), sizes, strict=True)) / 2


def _step_end_s(work: Mapping[str, Sequence[Interval]]) -> float:
    """Return the median seconds from the end of all work and sums of a step to the start of the next one's work."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for interval in (interval for intervals in work.values() for interval in intervals):
        begins[interval.step] = min(interval.start_s, begins.get(interval.step, interval.start_s))
        ends[interval.step] = max(interval.end_s, ends.get(interval.step, interval.end_s))
    return max(0.0, statistics.median(begins[step + 1] - ends[step] for step in ends if step + 1 in begins))
