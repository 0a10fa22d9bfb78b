"""Slots and cuts of `spantrain` as a plan: whole-sample shares, in-flight limits from memory."""

from collections.abc import Sequence
from dataclasses import replace

from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.shares import shares_of
from spantrain.core.span import equal_spans
from spantrain.cost.memory import Division
from spantrain.planner.strategies.spantrain.tables import WayTables
from spantrain.planner.strategies.spantrain.ways import Slot


def build_plan(tables: WayTables, slots: Sequence[Slot], cuts: Sequence[int], size: int) -> Plan | None:
    """Return the plan of slots that begin at these units (and the end); None if a replica's samples do not fit."""
    stages = []
    for slot, first, end in zip(slots, cuts[:-1], cuts[1:], strict=True):
        units = range(first, end)
        # Shares over the whole model were checked for memory by the tables; those over its own units suit it better.
        whole = range(tables.units)
        stage = _stage(tables, slot, units, size, whole=units) or _stage(tables, slot, units, size, whole=whole)
        if stage is None:
            return None
        stages.append(stage)
    return Plan(
        cluster=tables.profile.cluster,
        model=tables.profile.model,
        global_batch=tables.job.global_batch,
        dtype=tables.groups.compute.dtype,
        stages=tuple(stages),
        schedule=tables.job.schedule,
    )


def _stage(tables: WayTables, slot: Slot, units: range, size: int, *, whole: range) -> Stage | None:
    """Return a slot's stage, with shares by the times of the units in `whole`; None if it cannot be."""
    counts = tables.counts(slot, whole, size)
    if min(counts) == 0:
        return None
    # Limits are known only after the spans are: the first stage is a draft that gives the spans.
    draft = Stage(
        first_unit=units.start,
        end_unit=units.stop,
        micro_batches=equal_spans(tables.job.global_batch, size),
        replicas=tuple(
            Replica(
                devices=member.devices,
                tp_shares=member.tp_shares,
                sample_share=float(count),
                in_flight_limit=tables.job.global_batch,
            )
            for member, count in zip(slot.members, counts, strict=True)
        ),
    )
    limits = [_limit(tables, draft, index) for index in range(len(draft.replicas))]
    if None in limits:
        return None
    replicas = (
        replace(replica, in_flight_limit=limit) for replica, limit in zip(draft.replicas, limits, strict=True) if limit
    )
    return replace(draft, replicas=tuple(replicas))


def _limit(tables: WayTables, stage: Stage, index: int) -> int | None:
    """Return how many samples a replica may hold, all of its devices; None if that is under its largest micro-batch."""
    replica = stage.replicas[index]
    sizes = [span.size for span in stage.replica_spans(index)]
    splits = tables.job.splits_backward
    least = min(
        tables.memory.in_flight_limit_for(
            stage.units, name, sum(sizes), max(sizes), division=Division(tp_share=share, splits=splits)
        )
        for name, share in zip(replica.devices, shares_of(replica.tp_shares), strict=True)
    )
    return least if least >= max(sizes) else None
