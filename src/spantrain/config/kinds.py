"""Device kinds, those of kinds.yaml and those that a cluster file adds; and the `devices` of a host in such a file."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

from spantrain.config.files.problems import Problems
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.core.cluster import DeviceKind
from spantrain.core.quantities import parse_bandwidth, parse_bytes, parse_flop_rate, parse_power
from spantrain.core.records import Record
from spantrain.devices.registry import backend_names, find_backend

_CPU = "cpu"
_KEYS = ("peak_fp16", "peak_fp32", "memory", "memory_bandwidth", "power", "source")


def read_kind(name: str, field: Field) -> DeviceKind:
    """Read one entry of a `kinds` section; what is wrong becomes a problem of the field."""
    row = field.table(required=_KEYS, optional=("unified_memory",))
    source = row["source"].text() if "source" in row else None

    def value(key: str, parse: Callable[[str], float]) -> float:
        return row[key].quantity(parse) if key in row else 1.0

    return DeviceKind(
        name=name,
        peak_fp16_flop_per_s=value("peak_fp16", parse_flop_rate),
        peak_fp32_flop_per_s=value("peak_fp32", parse_flop_rate),
        memory_bytes=int(value("memory", parse_bytes)),
        memory_bandwidth_bytes_per_s=value("memory_bandwidth", parse_bandwidth),
        power_w=value("power", parse_power),
        source=source or "",
        unified_memory=row["unified_memory"].flag() if "unified_memory" in row else False,
    )


@cache
def load_kinds() -> Mapping[str, DeviceKind]:
    """Return the kinds that ship with the program, by name."""
    text = (resources.files("spantrain.config") / "kinds.yaml").read_text(encoding="utf-8")
    problems = Problems("kinds.yaml")
    kinds = {name: read_kind(name, field) for name, field in parse_yaml(text, problems).entries().items()}
    problems.check()
    return MappingProxyType(kinds)


_PLAIN_WORDS = re.compile(
    "nvidia|geforce|tesla|quadro|amd|instinct|radeon|intel|r|tm|graphics|gpu|apple|jetson|developer|kit|engineering|"
    "reference|generation|oam|mcm|ac|mba|sxm[2-9]?|pcie|hbm[23]e?|[0-9]+gb"
)
"""Words in a GPU's name that make it no other kind."""


def kind_named(text: str) -> str | None:
    """Return the shipped kind that a vendor's name of a GPU means; None where other words make it another one.

    >>> kind_named("NVIDIA GeForce RTX 4090"), kind_named("NVIDIA GeForce RTX 4090 Laptop GPU")
    ('rtx-4090', None)
    >>> kind_named("NVIDIA A100-SXM4-80GB"), kind_named("AMD INSTINCT MI250 (MCM) OAM AC MBA")
    ('a100-80gb', 'mi250')
    """
    words = set(re.findall(r"[a-z0-9]+", text.lower()))
    meant = {name: set(name.split("-")) for name in load_kinds() if name != _CPU}
    fitting = [
        name
        for name, of_kind in meant.items()
        if of_kind <= words and all(_PLAIN_WORDS.fullmatch(word) for word in words - of_kind)
    ]
    return max(fitting, key=lambda name: len(meant[name]), default=None)


class DeviceRow(Record):
    """One device as its host's entry describes it."""

    kind: str
    backend: str
    memory_bytes: int
    at: Field
    """Where it is described."""
    name: str = ""
    """Empty: it is named after its host."""


def read_devices(host: Mapping[str, Field], kinds: Mapping[str, DeviceKind]) -> list[DeviceRow]:
    """Read the devices of a host's entry; what is wrong becomes problems of its fields."""
    section = host.get("devices")
    if section is None:
        return []
    default = _read_backend(host["backend"]) if "backend" in host else None
    rows: list[DeviceRow] = []
    if section.is_list:
        for item in section.items():
            rows.append(_read_row(item, default, len(rows), kinds))
            if rows[-1].name and "count" in host:
                item.problem("hosts with a count share this entry; leave the device's name out, or list the hosts")
    else:
        for kind, amount in section.entries().items():
            _check_kind(kind, amount, kinds)
            for _ in range(amount.count(most=64) if kind in kinds else 1):
                backend = _backend(kind, default, len(rows), amount)
                memory_bytes = kinds[kind].memory_bytes if kind in kinds else 1
                rows.append(DeviceRow(kind=kind, backend=backend, memory_bytes=memory_bytes, at=amount))
    if not rows and (section.is_list or section.is_table):
        section.problem("a host needs at least one device, e.g. {rtx-4090: 2}")
    seen: set[str] = set()
    for row in rows:
        if _is_numbered(row.backend) and row.backend in seen:
            row.at.problem(f"{row.backend} is used twice on this host; give each device its own number")
        seen.add(row.backend)
    return rows


def _read_row(item: Field, default: str | None, index: int, kinds: Mapping[str, DeviceKind]) -> DeviceRow:
    row = item.table(required=("kind",), optional=("name", "backend", "memory"))
    kind = (row["kind"].text() or "") if "kind" in row else ""
    if kind:
        _check_kind(kind, row["kind"], kinds)
    asked = _read_backend(row["backend"]) if "backend" in row else default
    known = kinds[kind].memory_bytes if kind in kinds else 1
    return DeviceRow(
        kind=kind,
        backend=_backend(kind, asked, index, row.get("backend", item)),
        memory_bytes=int(row["memory"].quantity(parse_bytes)) if "memory" in row else known,
        at=item,
        name=row["name"].name() if "name" in row else "",
    )


def _check_kind(kind: str, at: Field, kinds: Mapping[str, DeviceKind]) -> None:
    if kind not in kinds:
        at.problem(f"{at.problems.unknown('device kind', kind, kinds)} (a new kind goes under `kinds`)")


def _read_backend(at: Field) -> str | None:
    text = at.text()
    if text is not None and find_backend(text) is None:
        at.problem(f"unknown backend {text!r}; write {backend_names()}")
        return None
    return text


def _backend(kind: str, asked: str | None, index: int, at: Field) -> str:
    """Return what computes: as asked, else the processor for kind cpu, else emulation.

    An accelerator without a number is the device of the same place in the host's list. A real device keeps its own
    kind of figures: measurements are kept by kind, so a processor must not pass for a shipped accelerator.
    """
    backend = asked or (_CPU if kind == _CPU else "emulated")
    if backend == _CPU and kind != _CPU and kind in load_kinds():
        at.problem(f"a {kind} cannot have the backend cpu; use kind cpu, a kind of your own, or backend emulated")
    numbered = _is_numbered(backend)
    if numbered and kind == _CPU:
        at.problem(f"kind cpu cannot have the backend {backend}; name the accelerator's kind")
    return f"{backend}:{index}" if numbered and ":" not in backend else backend


def _is_numbered(backend: str) -> bool:
    row = find_backend(backend)
    return row is not None and row.numbered
