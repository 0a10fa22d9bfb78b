"""Metrics in the text that Prometheus reads, of runs and of single processes; their names stay (docs/page.md)."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spantrain.outer.link.status import MasterStatus
    from spantrain.outer.shard.server import ShardServer
    from spantrain.runtime.worker.worker import Worker

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
Sample = tuple[Mapping[str, Any], float | None]
"""Labels and value; None is left out."""


def metrics_text(families: Iterable[tuple[str, str, str, Iterable[Sample]]]) -> str:
    """Return families of metrics (name without `spantrain_`, kind, help, samples) as text; none without samples.

    >>> print(metrics_text([("steps_total", "counter", "Steps done.", [({"run": "a"}, 3)])]), end="")
    # HELP spantrain_steps_total Steps done.
    # TYPE spantrain_steps_total counter
    spantrain_steps_total{run="a"} 3
    """
    lines = []
    for name, kind, help_, samples in families:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines += [f"# HELP spantrain_{name} {help_}", f"# TYPE spantrain_{name} {kind}"]
            lines += [f"spantrain_{name}{_labels(labels)} {value!r}" for labels, value in known]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, Any]) -> str:
    shown = ",".join(f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


_METERS = (
    ("device_load_ratio", "gauge", "Part of the time in which it computed anything", "load_ratio"),
    ("device_used_bytes", "gauge", "Of its memory, by whomever", "used_bytes"),
    ("device_power_watts", "gauge", "Taken now", "power_w"),
    ("device_energy_joules_total", "counter", "Taken", "energy_j"),
    ("device_clock_ratio", "gauge", "Of its processors, to the highest", "clock_ratio"),
)


def metrics_of_view(content: bytes | None) -> str:
    """Return the metrics of a run from what there is to see of it, `view.json`; nothing where that is not there yet."""
    if content is None:
        return ""
    view: dict[str, Any] = json.loads(content)
    run = {"run": view["run"]}
    devices = [({**run, "device": one["name"], "site": one["site"]}, one) for one in view["devices"]]
    meters = [(labels, one["meters"]) for labels, one in devices if one.get("meters")]
    links = [({**run, "source": one["source"], "target": one["target"]}, one) for one in view["links"]]

    def single(value: float | None) -> list[Sample]:
        return [(run, value)]

    def of(rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], field: str) -> list[Sample]:
        return [(labels, one[field]) for labels, one in rows]

    step_s = view["step_s"]
    samples = view["global_batch"] / step_s if step_s else None
    return metrics_text(
        [
            ("run_info", "gauge", "The run.", [({**run, **{name: view[name] for name in ("model", "schedule")}}, 1)]),
            ("run_running", "gauge", "1 while the run goes on.", single(int(view["state"] == "running"))),
            ("run_updated_seconds", "gauge", "When this was true, since 1970.", single(view["updated_unix_s"])),
            ("steps_total", "counter", "Steps done.", single(view["steps_done"])),
            ("steps_wanted", "gauge", "Steps wanted in all.", single(view["steps"])),
            ("plan_generation", "gauge", "Number of the plan that runs.", single(view["generation"])),
            ("loss", "gauge", "Of the last step.", single(view["losses"][-1][1] if view["losses"] else None)),
            ("eval_loss", "gauge", "Of the last evaluation.",
             single(view["evaluations"][-1][1] if view["evaluations"] else None)),
            ("step_seconds", "gauge", "Duration of the last step.", single(step_s)),
            ("step_forecast_seconds", "gauge", "The same as simulated.", single(view["step_s_forecast"])),
            ("samples_per_second", "gauge", "In the last step.", single(samples)),
            ("tokens_per_second", "gauge", "In the last step.", single(view["tokens_per_s"])),
            ("device_busy_ratio", "gauge", "Computing, over the last step.", of(devices, "busy_ratio")),
            ("device_busy_forecast_ratio", "gauge", "The same as simulated.", of(devices, "busy_ratio_forecast")),
            ("device_memory_bytes", "gauge", "What the device has.", of(devices, "memory_bytes")),
            ("device_peak_bytes", "gauge", "The most that its tensors held at once.", of(devices, "peak_bytes")),
            ("device_peak_forecast_bytes", "gauge", "The same as simulated.", of(devices, "peak_bytes_forecast")),
            ("device_held_samples", "gauge", "Most samples held at once.", of(devices, "held_samples")),
            *((name, kind, f"{what}, by its own meters.", of(meters, field)) for name, kind, what, field in _METERS),
            ("link_bytes_per_second", "gauge", "What messages got, as measured.", of(links, "bytes_per_s")),
            ("link_planned_bytes_per_second", "gauge", "What the plan was made for.", of(links, "planned_bytes_per_s")),
            ("link_used_bytes_per_second", "gauge", "Carried in the last step.", of(links, "used_bytes_per_s")),
        ]
    )  # fmt: skip


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
            ("shard_version", "gauge", "Served, of the first fragment.", [(own, one) for one in shard.versions[:1]]),
            ("shard_layers_sent_total", "counter", "Layers.", [(own, counters.layers_sent)]),
            ("shard_layers_received_total", "counter", "Layers.", [(own, counters.layers_received)]),
            ("shard_sent_bytes_total", "counter", "To a peer.", _by(own, "peer", counters.bytes_sent)),
            ("shard_received_bytes_total", "counter", "From a peer.", _by(own, "peer", counters.bytes_received)),
            ("shard_refused_total", "counter", "Turned away.", _by(own, "reason", counters.refused)),
        ]
    )


def _by(own: Mapping[str, str], label: str, values: Mapping[str, int]) -> list[Sample]:
    return [({**own, label: name}, value) for name, value in sorted(values.items())]
