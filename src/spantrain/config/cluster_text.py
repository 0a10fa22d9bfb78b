"""Cluster -> cluster.yaml, the text that `cluster_file` reads back as the same cluster.

Of a cluster that was found: without regions, prices and quotas, which people write, and with a link for each pair.
"""

import json
from collections.abc import Callable, Iterator, Sequence

from spantrain.config.kinds import load_kinds
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.names import is_name
from spantrain.core.quantities import format_bandwidth, format_bytes, parse_bandwidth, parse_bytes, parse_seconds


def cluster_text(cluster: Cluster, *, notes: Sequence[str] = ()) -> str:
    """Return the text of a cluster file; `notes` stand above it as comments."""
    return "".join(f"{line}\n" for line in _lines(cluster, notes))


def _lines(cluster: Cluster, notes: Sequence[str]) -> Iterator[str]:
    yield from (f"# {' '.join(note.split())}" for note in notes)
    yield f"name: {_text(cluster.name)}"
    if cluster.description:
        yield f"description: {_text(cluster.description)}"
    if cluster.emulated_speed != 1:
        yield f"emulated_speed: {cluster.emulated_speed!r}"
    own = [kind for kind in cluster.kinds if kind.name not in load_kinds()]
    if own:
        yield "kinds:"
    for kind in own:
        yield f"  {_text(kind.name)}:"
        yield from (
            f"    {key}: {_text(value) if key == 'source' else value}" for key, value in kind_text(kind).items()
        )
    yield "sites:"
    for site in cluster.sites:
        yield from _site(site, cluster)
    if cluster.links:
        yield "links:"
    yield from _links(cluster.links)


def kind_text(kind: DeviceKind) -> dict[str, str]:
    """Return the fields of a kind in a cluster file."""
    rate = kind.memory_bandwidth_bytes_per_s
    return {
        "peak_fp16": _flop_rate(kind.peak_fp16_flop_per_s),
        "peak_fp32": _flop_rate(kind.peak_fp32_flop_per_s),
        "memory": _memory(kind.memory_bytes),
        "memory_bandwidth": _exact(rate, f"{rate / 1e9:g} GB/s", parse_bandwidth, "B/s"),
        "power": f"{kind.power_w!r} W",
        "source": kind.source or "not known",
        **({"unified_memory": "true"} if kind.unified_memory else {}),
    }


def _site(site: Site, cluster: Cluster) -> Iterator[str]:
    yield f"  - name: {_text(site.name)}"
    yield f"    network: {{bandwidth: {rate_text(site.bandwidth_bytes_per_s)}, latency: {_delay(site.latency_s)}}}"
    for way, rate in (("up", site.uplink_bandwidth_bytes_per_s), ("down", site.downlink_bandwidth_bytes_per_s)):
        if rate is not None:
            yield f"    {way}link: {rate_text(rate)}"
    yield "    hosts:"
    for name in site.hosts:
        yield from _host(cluster.host_by_name[name], cluster)


def _host(host: Host, cluster: Cluster) -> Iterator[str]:
    yield f"      - name: {_text(host.name)}"
    for key, text in (("address", host.address), ("ssh", host.ssh), ("python", host.python)):
        if text is not None:
            yield f"        {key}: {_text(text)}"
    if host.memory_bytes is not None:
        yield f"        memory: {_memory(host.memory_bytes)}"
    yield "        devices:"
    devices = [cluster.device_by_name[name] for name in host.devices]
    for index, device in enumerate(devices):
        stem = "cpu" if device.backend == "cpu" else "gpu"
        usual = host.name if len(devices) == 1 else f"{host.name}-{stem}{index}"
        yield f"          - {{{', '.join(_device(device, usual, cluster))}}}"


def _device(device: Device, usual_name: str, cluster: Cluster) -> Iterator[str]:
    yield f"kind: {_text(device.kind)}"
    if device.name != usual_name:
        yield f"name: {_text(device.name)}"
    if device.backend != ("cpu" if device.kind == "cpu" else "emulated"):
        yield f"backend: {_text(device.backend)}"
    if device.memory_bytes != cluster.kind_by_name[device.kind].memory_bytes:
        yield f"memory: {_memory(device.memory_bytes)}"


def _links(links: Sequence[Link]) -> Iterator[str]:
    by_pair = {(link.source, link.target): _link(link) for link in links}
    while by_pair:
        (source, target), text = next(iter(by_pair.items()))
        del by_pair[source, target]
        if by_pair.get((target, source)) == text:
            del by_pair[target, source]
            yield f"  - {{between: [{_text(source)}, {_text(target)}], {text}}}"
        else:
            yield f"  - {{from: {_text(source)}, to: {_text(target)}, {text}}}"


def _link(link: Link) -> str:
    parts = [f"bandwidth: {rate_text(link.bandwidth_bytes_per_s)}", f"latency: {_delay(link.latency_s)}"]
    if link.jitter_s:
        parts.append(f"jitter: {_delay(link.jitter_s)}")
    if link.loss_ratio:
        parts.append(f"loss: {link.loss_ratio!r}")
    return ", ".join(parts)


def _text(text: str) -> str:
    return text if is_name(text) else json.dumps(text, ensure_ascii=False)


def _exact(value: float, text: str, parse: Callable[[str], float], unit: str) -> str:
    """Return a quantity as people write it where that reads back as the same number, else in its own unit."""
    return text if parse(text) == value else f"{value!r} {unit}"


def rate_text(value: float) -> str:
    """Return bytes a second as a cluster file has them: what is read back is the same number."""
    return _exact(value, format_bandwidth(value), parse_bandwidth, "B/s")


def _delay(value: float) -> str:
    return _exact(value, f"{value * 1e3:g} ms", parse_seconds, "s")


def _memory(value: int) -> str:
    text = format_bytes(value)
    return text if parse_bytes(text) == value else _exact(value, f"{value / 2**20:.10g} MiB", parse_bytes, "B")


def _flop_rate(value: float) -> str:
    return f"{value / 1e12!r} TFLOP/s"
