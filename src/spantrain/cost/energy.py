"""Energy of a step: devices that work and that wait, and the network between sites."""

from collections.abc import Mapping
from dataclasses import dataclass

from spantrain.core.cluster import Cluster
from spantrain.cost.money import between_sites

IDLE_POWER_RATIO = 0.2
"""Power of a device that waits inside a step, as a part of its kind's power figure.

A round assumption, not a measurement: data-centre accelerators with a loaded program draw 50-120 W of 300-700 W while
they wait, boards 2-4 W of 10-15 W.
"""

NETWORK_J_PER_BYTE = 1.35e-5
"""Energy of one byte between sites.

Aslan, Mayers, Koomey, France, "Electricity Intensity of Internet Data Transmission" (2018): 0.06 kWh/GB in 2015 for
fixed lines, halving every two years; carried on to 2023 that is 0.00375 kWh/GB. The decline after 2015 is assumed.
Networks inside a site are not counted.
"""


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Joules of a step."""

    by_device: Mapping[str, float]
    network_j: float

    @property
    def total_j(self) -> float:
        """All of it."""
        return sum(self.by_device.values()) + self.network_j


def energy_of_step(
    cluster: Cluster, step_s: float, *, busy_s: Mapping[str, float], sent_bytes: Mapping[tuple[str, str], int]
) -> Energy:
    """Return the energy of a step in which each device of `busy_s` works for so long and waits for the rest.

    A device that works draws its kind's power figure, which is a limit that makers give: an upper estimate.
    """
    by_device = {}
    for name, seconds in busy_s.items():
        power_w = cluster.kind_by_name[cluster.device_by_name[name].kind].power_w
        by_device[name] = power_w * (seconds + IDLE_POWER_RATIO * max(0.0, step_s - seconds))
    crossed = sum(size for _, size in between_sites(cluster, sent_bytes))
    return Energy(by_device=by_device, network_j=crossed * NETWORK_J_PER_BYTE)
