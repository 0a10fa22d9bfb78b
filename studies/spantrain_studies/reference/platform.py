"""A training framework other than ours, as a platform: what it adds to computation, transfers and memory.

Its constants are in a data file beside this one, each with unit, meaning and where it comes from; one set for a
platform, never one for a model or a run. `fit` fits those marked `fitted`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

import yaml


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What a framework costs beside the layers themselves."""

    name: str
    launch_exposure: float
    """Part of the time above the device-bound one that a running step shows; 1: all that a layer alone shows."""
    relaunched_layers: float
    """With each micro-batch received the device idles while the host, which has read its shape, launches so much."""
    buffer_bytes: float
    """Of each rank's message: what the transport's buffers hold. The sender is kept until only that is left."""
    bytes_per_parameter: float
    """Weights, gradients, optimizer state and the framework's copies."""
    workspace_ratio: float
    """What the layer at work takes for a while, and what the allocator cannot use again, over what it keeps."""
    base_bytes: Mapping[str, float]
    """By kind of device: context, libraries, communicators. `other` stands for kinds that are not listed."""

    def __post_init__(self) -> None:
        for name in ("launch_exposure", "relaunched_layers", "buffer_bytes", "bytes_per_parameter", "workspace_ratio"):
            if getattr(self, name) < 0:
                raise ValueError(f"platform {self.name}: {name} must not be negative, got {getattr(self, name)}")
        if "other" not in self.base_bytes or min(self.base_bytes.values()) < 0:
            raise ValueError(f"platform {self.name}: base_bytes needs 'other' and no negative entry")

    def base_bytes_of(self, kind: str) -> float:
        """Return what is taken before the first tensor on a kind of device."""
        return self.base_bytes.get(kind, self.base_bytes["other"])

    def send_hold_s(self, seconds: float, rank_bytes: float) -> float:
        """Return for how long a send of so many seconds, and bytes of each rank, keeps the device."""
        return seconds * max(0.0, 1.0 - self.buffer_bytes / rank_bytes) if rank_bytes else 0.0


@cache
def load_platform(name: str) -> Platform:
    """Return a platform that ships with the program, by its file's name without the ending.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    text = (resources.files("spantrain_studies.reference") / "platforms" / f"{name}.yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text)["constants"]
    values = {key: row["value"] for key, row in rows.items()}
    base = {str(kind): float(size) for kind, size in values.pop("base_bytes").items()}
    return Platform(
        name=name, base_bytes=MappingProxyType(base), **{str(key): float(value) for key, value in values.items()}
    )


def device_bound_s(points: Mapping[int, float], samples: int) -> float:
    """Return the seconds that the device alone needs, from times at several micro-batch sizes.

    A micro-batch that is too small leaves the device waiting for launches, so the seconds per sample fall until the
    device is busy; what the best measured size (this one or a larger) needs per sample is the device's own part.

    >>> device_bound_s({1: 1.5, 2: 1.7, 4: 2.0, 8: 4.0}, 2)
    1.0
    """
    return samples * min(seconds / size for size, seconds in points.items() if size >= samples)


def measured_s(points: Mapping[int, float], samples: int) -> float:
    """Return the measured seconds of a micro-batch; linear between measured sizes, in proportion outside of them.

    >>> measured_s({2: 1.0, 4: 3.0}, 3), measured_s({2: 1.0, 4: 3.0}, 8), measured_s({2: 1.0}, 1)
    (2.0, 6.0, 0.5)
    """
    if samples in points:
        return points[samples]
    below = max((size for size in points if size < samples), default=None)
    above = min((size for size in points if size > samples), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None, "no times to go by"
        return points[nearest] * samples / nearest
    part = (samples - below) / (above - below)
    return points[below] + part * (points[above] - points[below])


def running_s(points: Mapping[int, float], samples: int, launch_exposure: float) -> float:
    """Return the seconds of a layer inside a running step, from its seconds measured alone.

    >>> round(running_s({1: 1.5, 2: 1.7, 4: 2.0}, 1, 0.8), 3)
    1.3
    """
    alone_s = measured_s(points, samples)
    points = {**points, samples: alone_s}
    device_s = device_bound_s(points, samples)
    return device_s + launch_exposure * (alone_s - device_s)
