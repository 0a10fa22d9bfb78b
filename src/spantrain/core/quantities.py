"""Quantities people write ("100 Mbit/s", "20 ms", "8 GiB", "250 W") and SI numbers: parse and format."""

import math
import re
import statistics
from collections.abc import Iterable

_NUMBER = re.compile(r"\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(\S.*?)?\s*")
_BANDWIDTH = {
    "bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8,
    "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9,
}  # fmt: skip
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_FLOP_RATE = {"GFLOP/s": 1e9, "GFLOPS": 1e9, "TFLOP/s": 1e12, "TFLOPS": 1e12, "PFLOP/s": 1e15, "PFLOPS": 1e15}
_POWER = {"W": 1.0, "kW": 1e3}


def if_finite(value: float) -> float | None:
    """Return a measured number; None if it is infinite or no number, for which files have none."""
    return value if math.isfinite(value) else None


def mean_of_finite(values: Iterable[float | None]) -> float:
    """Return the mean of those that are finite; no number if none is."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan


def _parse(text: str | float, units: dict[str, float], example: str) -> float:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} needs a number and one of {', '.join(units)}, e.g. {example!r}")
    value = float(match[1]) * units[match[2]]
    if value < 0:
        raise ValueError(f"{text!r} is negative; it must be zero or more")
    if value == math.inf:
        raise ValueError(f"{text!r} is too large")
    return value


def parse_bandwidth(text: str) -> float:
    """Return bytes per second.

    >>> parse_bandwidth("100 Mbit/s")
    12500000.0
    """
    return _parse(text, _BANDWIDTH, "100 Mbit/s")


def parse_seconds(text: str) -> float:
    """Return seconds.

    >>> parse_seconds("20 ms")
    0.02
    """
    return _parse(text, _SECONDS, "20 ms")


def parse_bytes(text: str) -> int:
    """Return bytes.

    >>> parse_bytes("8 GiB")
    8589934592
    """
    return round(_parse(text, _BYTES, "8 GiB"))


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


def format_bandwidth(bytes_per_s: float) -> str:
    """Return bits per second as people write them.

    >>> format_bandwidth(12.5e6)
    '100 Mbit/s'
    """
    for unit in ("Gbit/s", "Mbit/s", "kbit/s"):
        if bytes_per_s >= _BANDWIDTH[unit]:
            return f"{bytes_per_s / _BANDWIDTH[unit]:.4g} {unit}"
    return f"{bytes_per_s * 8:.4g} bit/s"


def format_seconds(seconds: float) -> str:
    """Return a duration as people write it.

    >>> format_seconds(0.0213), format_seconds(75)
    ('21.3 ms', '75 s')
    """
    for unit in ("s", "ms"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def format_bytes(count: float) -> str:
    """Return bytes as people write them.

    >>> format_bytes(1536), format_bytes(8 * 2**30)
    ('1.5 KiB', '8 GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _BYTES[unit]:
            return f"{count / _BYTES[unit]:.3g} {unit}"
    return f"{count:.0f} B"


def format_speed(samples_per_s: float) -> str:
    """Return samples per second in four digits.

    >>> format_speed(31.0412), format_speed(12345.6)
    ('31.04', '12,346')
    """
    return f"{samples_per_s:.4g}" if samples_per_s < 1000 else f"{samples_per_s:,.0f}"
