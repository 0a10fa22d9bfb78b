"""Device kinds: the data sheets in kinds.yaml, and kinds that a cluster file adds."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

from spantrain.config.files.problems import Problems
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.core.cluster import DeviceKind
from spantrain.core.quantities import parse_bandwidth, parse_bytes

_KEYS = ("peak_fp16", "peak_fp32", "memory", "memory_bandwidth", "power", "source")
_QUANTITY = re.compile(r"(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([A-Za-z/]+)")
_FLOP_RATE = {"GFLOP/s": 1e9, "GFLOPS": 1e9, "TFLOP/s": 1e12, "TFLOPS": 1e12, "PFLOP/s": 1e15, "PFLOPS": 1e15}
_POWER = {"W": 1.0, "kW": 1e3}


def parse_flop_rate(text: str) -> float:
    """Return floating-point operations per second.

    >>> parse_flop_rate("18.7 TFLOP/s")
    18700000000000.0
    """
    return _parse(text, _FLOP_RATE, "18.7 TFLOP/s")


def parse_power(text: str) -> float:
    """Return watts.

    >>> parse_power("250 W")
    250.0
    """
    return _parse(text, _POWER, "250 W")


def _parse(text: str, units: Mapping[str, float], example: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} needs a number and one of {', '.join(units)}, e.g. {example!r}")
    return float(match[1]) * units[match[2]]


def read_kind(name: str, field: Field) -> DeviceKind:
    """Read one entry of a `kinds` section; what is wrong becomes a problem of the field."""
    row = field.table(required=_KEYS)
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
    )


@cache
def load_kinds() -> Mapping[str, DeviceKind]:
    """Return the kinds that ship with the program, by name."""
    text = (resources.files("spantrain.config") / "kinds.yaml").read_text(encoding="utf-8")
    problems = Problems("kinds.yaml")
    kinds = {name: read_kind(name, field) for name, field in parse_yaml(text, problems).entries().items()}
    problems.check()
    return MappingProxyType(kinds)
