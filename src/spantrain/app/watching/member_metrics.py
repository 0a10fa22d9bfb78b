"""Metrics of single processes: a worker, the outer optimizer's master, one of its shards."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spantrain.app.watching.metrics_text import Sample, metrics_text

if TYPE_CHECKING:
    from spantrain.outer.link.status import MasterStatus
    from spantrain.outer.shard.server import ShardServer
    from spantrain.runtime.worker.worker import Worker


def worker_metrics(worker: "Worker") -> str:
    """Return what a worker has done, and what went to and came from each peer."""
    held, counters = worker.held, worker.counters()
    own = {"device": worker.name}
    peers = [({**own, "peer": peer}, one) for peer, one in sorted(counters.peers.items())] if counters else []
    return metrics_text(
        [
            ("worker_joined", "gauge", "1 once it has joined a coordinator.", [(own, int(counters is not None))]),
            ("worker_steps_total", "counter", "Steps whose updates it holds.", [(own, held.steps if held else None)]),
            ("worker_sent_bytes_total", "counter", "To a peer.", [(to, one.wire_bytes_sent) for to, one in peers]),
            ("worker_received_bytes_total", "counter", "From a peer.",
             [(to, one.wire_bytes_received) for to, one in peers]),
            ("worker_send_stall_seconds_total", "counter", "Waiting for room on the way to a peer.",
             [(to, one.send_stall_s) for to, one in peers]),
            ("worker_reconnections_total", "counter", "To a peer.", [(to, one.reconnections) for to, one in peers]),
            ("worker_refused_total", "counter", "Messages turned away.",
             _by(own, "reason", counters.refused if counters else {})),
        ]
    )  # fmt: skip


def master_metrics(status: "MasterStatus") -> str:
    """Return what a master tells of itself, its clusters and shards."""
    clusters = [({"cluster": one.name}, one) for one in status.clusters]
    links = [({"cluster": one.cluster, "shard": one.shard, "way": one.way}, one) for one in status.links]
    shards = [({"shard": one.name}, one) for one in status.shards]
    return metrics_text(
        [
            ("outer_version", "gauge", "Of the parameters.", [({}, status.version)]),
            ("outer_updates_total", "counter", "Updates made.", [({}, status.updates)]),
            ("outer_left_out_total", "counter", "Pushes left out.", [({}, status.left_out)]),
            ("outer_late_seconds", "gauge", "Without a version that was due.", [({}, status.late_s or 0.0)]),
            ("outer_cluster_tokens_total", "counter", "Trained on.", [(name, one.tokens) for name, one in clusters]),
            ("outer_cluster_pushes_total", "counter", "Pushes.", [(name, one.pushes) for name, one in clusters]),
            ("outer_cluster_left_out_total", "counter", "Left out.", [(name, one.left_out) for name, one in clusters]),
            ("outer_cluster_staleness", "gauge", "Versions.", [(name, one.mean_staleness) for name, one in clusters]),
            ("outer_cluster_here", "gauge", "1: is.", [(name, int(one.state != "away")) for name, one in clusters]),
            ("outer_shard_ready", "gauge", "1 if ready.", [(name, int(one.state == "ready")) for name, one in shards]),
            ("outer_shard_parameter_bytes", "gauge", "Held.", [(name, one.size_bytes) for name, one in shards]),
            ("outer_link_bytes_per_second", "gauge", "Of late.", [(name, one.bytes_per_s) for name, one in links]),
            ("outer_link_bytes_total", "counter", "Carried.", [(name, one.size_bytes) for name, one in links]),
            ("outer_refused_total", "counter", "Requests turned away.", _by({}, "reason", status.refusals)),
        ]
    )  # fmt: skip


def shard_metrics(name: str, shard: "ShardServer") -> str:
    """Return what a shard serves and has carried."""
    own, counters = {"shard": name}, shard.counters()
    return metrics_text(
        [
            ("shard_version", "gauge", "That it serves, of the first fragment.", [(own, shard.version)]),
            ("shard_layers_sent_total", "counter", "Layers.", [(own, counters.layers_sent)]),
            ("shard_layers_received_total", "counter", "Layers.", [(own, counters.layers_received)]),
            ("shard_sent_bytes_total", "counter", "To a peer.", _by(own, "peer", counters.bytes_sent)),
            ("shard_received_bytes_total", "counter", "From a peer.", _by(own, "peer", counters.bytes_received)),
            ("shard_refused_total", "counter", "Turned away.", _by(own, "reason", counters.refused)),
        ]
    )


def _by(own: Mapping[str, str], label: str, values: Mapping[str, int]) -> list[Sample]:
    return [({**own, label: name}, value) for name, value in sorted(values.items())]
