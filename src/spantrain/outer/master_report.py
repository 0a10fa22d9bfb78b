"""A master's status, put together from what its desk knows."""

from spantrain.outer.master_desk import MasterDesk
from spantrain.outer.master_status import (
    ChunksStatus,
    ClusterStatus,
    GuardStatus,
    MasterStatus,
    ShardStatus,
    UpdateStatus,
)
from spantrain.policy.outer.master import OuterMaster
from spantrain.policy.outer.settings import ClusterRecord, MasterState

__all__ = ["status_of"]


def status_of(desk: MasterDesk, *, address: str, now_s: float) -> MasterStatus:
    """Return all that a master can tell of itself, but for what the control plane refused."""
    state, layout = desk.state, desk.layout
    return MasterStatus(
        address=address,
        epoch=state.epoch,
        version=state.version,
        seeded=state.seeded,
        updates=state.updates,
        left_out=state.left_out,
        layers=len(layout.layers) if layout else 0,
        size_bytes=layout.size_bytes if layout else 0,
        clusters=_clusters(desk, now_s),
        shards=tuple(_shard(desk, name, now_s) for name in desk.config.shards),
        transfers=desk.clock.moving(now_s),
        links=desk.clock.links,
        guard=_guard(state),
        last_update=_last_update(desk.master),
        chunks=_chunks(state),
        refusals=dict(desk.refusals),
        dropped={**desk.dropped, **(desk.master.dropped if desk.master else {})},
    )


def _clusters(desk: MasterDesk, now_s: float) -> tuple[ClusterStatus, ...]:
    here = {one.name for one in desk.connections if one.facts.kind == "cluster"}
    return tuple(_cluster(desk, name, now_s) for name in sorted(here | desk.state.clusters.keys()))


def _cluster(desk: MasterDesk, name: str, now_s: float) -> ClusterStatus:
    record = desk.state.clusters.get(name, ClusterRecord())
    connection = desk.connections.get(name)
    chunks = desk.state.chunks
    return ClusterStatus(
        name=name,
        state=_cluster_state(desk, name),
        workers=tuple(sorted(desk.master.workers_of(name))) if desk.master else (),
        tokens=record.tokens,
        pushes=record.pushes,
        left_out=record.left_out,
        mean_staleness=record.staleness / record.pushes if record.pushes else 0.0,
        version=record.version,
        leases=sum(lease.cluster == name for lease in chunks.leases) if chunks else 0,
        heard_ago_s=now_s - connection.heard_s if connection else None,
    )


def _cluster_state(desk: MasterDesk, name: str) -> str:
    if desk.connections.get(name) is None:
        return "away"
    if desk.master is None or name not in desk.master.clusters:
        return "joining"
    return "waiting" if name in desk.master.waiting else "training"


def _shard(desk: MasterDesk, name: str, now_s: float) -> ShardStatus:
    connection = desk.connections.get(name)
    table = desk.master.shards if desk.master else None
    layers = [desk.layout.layers[k] for k in desk.layout.layers_of(name)] if desk.layout else []
    state = "away"
    if table and table.is_present(name):
        state = "ready" if name in table.ready else "restoring"
    elif connection:
        state = "joining"
    return ShardStatus(
        name=name,
        state=state,
        endpoint=connection.facts.endpoint if connection else "",
        versions=tuple(sorted(table.versions.get(name, ()))) if table else (),
        layers=len(layers),
        size_bytes=sum(layer.size_bytes for layer in layers),
        heard_ago_s=now_s - connection.heard_s if connection else None,
    )


def _guard(state: MasterState) -> GuardStatus:
    guard = state.guard
    return GuardStatus(
        mean=guard.mean,
        deviation=guard.deviation,
        largest_score=guard.largest_score,
        warm_up=len(guard.warm_up_norms),
        refused_in_row=guard.refused_in_row,
    )


def _last_update(master: OuterMaster | None) -> UpdateStatus | None:
    outcome = master.last_outcome if master else None
    if outcome is None:
        return None
    verdicts = {one.cluster: f"{'in' if one.accepted else 'left out'}: {one.reason}" for one in outcome.verdicts}
    return UpdateStatus(
        version=outcome.version, norm=outcome.norm, scale=outcome.scale, part=outcome.part, verdicts=verdicts
    )


def _chunks(state: MasterState) -> ChunksStatus | None:
    chunks = state.chunks
    if chunks is None:
        return None
    samples = sum(chunks.chunk_samples)
    counted = sum(chunks.counted)
    return ChunksStatus(
        chunks=len(chunks.chunk_samples),
        samples=samples,
        counted_samples=counted,
        passes=chunks.passes,
        leases=len(chunks.leases),
        finished=chunks.passes is not None and counted == chunks.passes * samples,
    )
