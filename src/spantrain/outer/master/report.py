"""A master's status, put together from what its service knows."""

from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from spantrain.outer.link import status
from spantrain.outer.master.service import MasterService
from spantrain.outer.policy.fragments import FragmentedMaster
from spantrain.outer.policy.guard import NormLevel
from spantrain.outer.policy.master import OuterMaster
from spantrain.outer.policy.settings import ClusterRecord, MasterState

T = TypeVar("T")


def status_of(service: MasterService, *, address: str, now_s: float) -> status.MasterStatus:
    """Return all that a master can tell of itself."""
    state, layout = service.state, service.layout
    leading, late_s = state.leading, service.late_s(now_s)
    here = {one.name for one in service.connections if one.facts.kind == "cluster"}
    counted = (one.clusters.keys() for one in state.fragments)
    return status.MasterStatus(
        address=address, epoch=leading.epoch, version=leading.version, seeded=state.seeded, late_s=late_s,
        waits_for="" if late_s is None else _waits_for(service, now_s),
        updates=sum(one.updates for one in state.fragments), left_out=sum(one.left_out for one in state.fragments),
        layers=len(layout.layers) if layout else 0, size_bytes=layout.size_bytes if layout else 0,
        clusters=tuple(_cluster(service, name, now_s) for name in sorted(here.union(*counted))),
        shards=tuple(_shard(service, name, now_s) for name in service.config.shards),
        transfers=_transfers(service.master, now_s) if service.master else (),
        links=_links(service.master) if service.master else (),
        last_update=_last_update(service.master.parts[0] if service.master else None),
        fragments=tuple(map(_fragment, service.master.parts)) if service.master and len(state.fragments) > 1 else (),
        chunks=_chunks(leading), refusals=service.refusals.snapshot(),
        dropped={**service.dropped, **(service.master.dropped if service.master else {})},
    )  # fmt: skip


def _cluster(service: MasterService, name: str, now_s: float) -> status.ClusterStatus:
    records = [one.clusters.get(name, ClusterRecord()) for one in service.state.fragments]
    pushes = sum(record.pushes for record in records)
    connection = service.connections.get(name)
    chunks = service.state.leading.chunks
    level = service.state.leading.guard.clusters.get(name, NormLevel())
    members = service.master.parts[0].members if service.master else None
    got_version, got_s = members.got.get(name, (None, None)) if members else (None, None)
    return status.ClusterStatus(
        name=name, state=_cluster_state(service, name, now_s),
        workers=tuple(sorted(members.workers.get(name, ()))) if members else (), tokens=records[0].tokens,
        pushes=pushes, left_out=sum(record.left_out for record in records),
        mean_staleness=sum(record.staleness for record in records) / pushes if pushes else 0.0,
        version=records[0].version, got_version=got_version, got_ago_s=None if got_s is None else now_s - got_s,
        usual_norm=level.usual, norm_limit=level.limit(service.config.settings.guard),
        refused_in_row=level.refused_in_row,
        leases=sum(lease.cluster == name for lease in chunks.leases) if chunks else 0,
        heard_ago_s=now_s - connection.heard_s if connection else None,
    )  # fmt: skip


def _cluster_state(service: MasterService, name: str, now_s: float) -> str:
    if service.connections.get(name) is None:
        return "away"
    if service.master is None or name not in service.master.clusters:
        return "joining"
    if name in service.master.waiting:
        return "waiting"
    return "training" if any(name in part.trains(now_s) for part in service.master.parts) else "idle"


def _waits_for(service: MasterService, now_s: float) -> str:
    """Return what a new version needs that has not come."""
    shards = [_shard(service, name, now_s) for name in service.config.shards]
    if absent := [f"shard {one.name}, which is {one.state}" for one in shards if one.state != "ready"]:
        return ", ".join(absent)
    assert service.master
    if answers := sorted({shard for part in service.master.parts for shard in part.updates.missing}):
        return f"answers of {', '.join(answers)} in an update"
    pushes = [one for one in _transfers(service.master, now_s) if one.way == "push"]
    if pushes:
        first = max(pushes, key=lambda one: one.since_s)
        return (
            f"layer {first.layer} of a push of {first.cluster}, on its way to {first.shard} for {first.since_s:.3g} s"
        )
    trains = sorted({name for part in service.master.parts for name in part.trains(now_s)})
    return f"a push of {', '.join(trains) or 'any cluster'}"


def _shard(service: MasterService, name: str, now_s: float) -> status.ShardStatus:
    connection = service.connections.get(name)
    tables = [part.shards for part in service.master.parts] if service.master else []
    layers = [service.layout.layers[k] for k in service.layout.layers_of(name)] if service.layout else []
    state = "away"
    if tables and all(name in table.alive for table in tables):
        state = "ready" if all(name in table.ready for table in tables) else "restoring"
    elif connection:
        state = "joining"
    return status.ShardStatus(
        name=name,
        state=state,
        endpoint=connection.facts.endpoint if connection else "",
        versions=tuple(sorted(tables[0].versions.get(name, ()))) if tables else (),
        layers=len(layers),
        size_bytes=sum(layer.size_bytes for layer in layers),
        heard_ago_s=now_s - connection.heard_s if connection else None,
    )


def _transfers(master: FragmentedMaster, now_s: float) -> tuple[status.TransferStatus, ...]:
    """Return the layers on their way, those that began first first."""
    moving = [
        (begun_s, way, one) for way, schedule in master.lines.schedules.items()
        for one, begun_s in schedule.running.items()
    ]  # fmt: skip
    return tuple(
        _as_in(one, status.TransferStatus, way=way.value, layer=master.layer_of(one), since_s=now_s - begun_s)
        for begun_s, way, one in sorted(moving, key=itemgetter(0))
    )


def _links(master: FragmentedMaster) -> tuple[status.LayerLinkStatus, ...]:
    """Return what went over each link, by cluster, shard and way."""
    links = (
        _as_in(link, status.LayerLinkStatus, cluster=cluster, shard=shard, way=way.value)
        for way, schedule in master.lines.schedules.items()
        for (cluster, shard), link in schedule.links.items()
    )
    return tuple(sorted(links, key=attrgetter("cluster", "shard", "way")))


def _fragment(part: OuterMaster) -> status.FragmentStatus:
    layers, size_bytes = len(part.layout.layers), part.layout.size_bytes
    return _as_in(
        part.state, status.FragmentStatus, layers=layers, size_bytes=size_bytes, last_update=_last_update(part)
    )


def _last_update(master: OuterMaster | None) -> status.UpdateStatus | None:
    last = master.updates.last if master else None
    if last is None:
        return None
    verdicts = {one.cluster: f"{'in' if one.accepted else 'left out'}: {one.reason}" for one in last.verdicts}
    return _as_in(last, status.UpdateStatus, verdicts=verdicts)


def _as_in(source: object, kind: type[T], **more: Any) -> T:
    """Return a record of what a source has under the names of its fields, and of what is given besides."""
    names = {one.name for one in fields(kind)} - more.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names}, **more)


def _chunks(state: MasterState) -> status.ChunksStatus | None:
    one = state.chunks
    return _as_in(one, status.ChunksStatus, counted_samples=one.counted, leases=len(one.leases)) if one else None
