"""The time that an emulated device takes, from its kind's law."""

from collections.abc import Callable, Sequence

from spantrain.core.action import Op
from spantrain.core.cluster import Cluster
from spantrain.core.units import Unit
from spantrain.cost.analytic import AnalyticLaw

__all__ = ["emulated_seconds", "law_of"]


def law_of(cluster: Cluster, device: str, dtype: str) -> AnalyticLaw | None:
    """Return the law of an emulated device; None for a real one."""
    entry = cluster.device_by_name[device]
    if not entry.emulated:
        return None
    return AnalyticLaw(kind=cluster.kind_by_name[entry.kind], speed=cluster.emulated_speed, dtype=dtype)


def emulated_seconds(
    cluster: Cluster, device: str, dtype: str, units: Sequence[Unit]
) -> Callable[[Op, int], float | None]:
    """Return (operation, samples) -> seconds of a stage's action; None: as long as it takes."""
    law = law_of(cluster, device, dtype)
    if law is None:
        return lambda _op, _samples: None
    known: dict[tuple[Op, int], float] = {}

    def seconds(op: Op, samples: int) -> float:
        if (op, samples) not in known:
            known[op, samples] = sum(law.seconds(unit, op, samples) for unit in units)
        return known[op, samples]

    return seconds
