"""The time that an emulated device takes, from its kind's law."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from spantrain.core.action import Op
from spantrain.core.cluster import Cluster
from spantrain.core.units import Unit
from spantrain.cost.analytic import AnalyticLaw
from spantrain.cost.compute import operations_of


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
    by_unit = emulated_unit_seconds(cluster, device, {device: [1.0] * len(units)}, dtype, units)
    return (lambda _op, _samples: None) if by_unit is None else (lambda op, samples: sum(by_unit(op, samples)))


def emulated_unit_seconds(
    cluster: Cluster,
    device: str,
    shares: Mapping[str, Sequence[float]],
    dtype: str,
    units: Sequence[Unit],
    *,
    recompute: Collection[int] = (),
) -> Callable[[Op, int], tuple[float, ...]] | None:
    """Return (operation, samples) -> seconds of each unit on a member of a tensor-parallel group; None: a real device.

    Members wait for each other where they sum, in every unit, so each unit takes the time of its slowest emulated
    member: that device's share of what it would take it alone, as `cost.compute` reckons. What the sums themselves take
    is real, and comes on top (`runtime.step.work`).

    Args:
        cluster: the kinds of all devices.
        device: the member; a real one takes the time it takes.
        shares: by member, the part of each unit that it computes.
        dtype: what products are computed in.
        units: of the stage.
        recompute: positions of those that are run again in the backward pass.
    """
    if law_of(cluster, device, dtype) is None:
        return None
    laws = [(law, shares[name]) for name in shares if (law := law_of(cluster, name, dtype)) is not None]

    @cache
    def seconds(op: Op, samples: int) -> tuple[float, ...]:
        return tuple(
            sum(
                max(share[number] * law.seconds(unit, operation, samples) for law, share in laws)
                for operation in operations_of(op, recomputed=number in recompute)
            )
            for number, unit in enumerate(units)
        )

    return seconds
