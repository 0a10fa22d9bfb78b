"""Where the planner may have devices divide tensors among themselves."""

from collections.abc import Sequence
from enum import StrEnum

from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan

_FAST_BYTES_PER_S = 50e9
"""Inside a host: fast enough for sums in the middle of layers, as NVLink is, and PCIe is not."""


class TensorParallel(StrEnum):
    """What is allowed."""

    AUTO = "auto"
    """In hosts of which the cluster file says (`inside`) that fast links join their devices, where it gains enough."""
    ANY = "any"
    """Wherever a strategy has it."""
    NONE = "none"

    @property
    def worth(self) -> float:
        """How many times as good a plan must be to have it; of what is divided, nothing is kept twice."""
        return 1.03 if self is TensorParallel.AUTO else 1.01

    def allows(self, cluster: Cluster, devices: Sequence[str]) -> bool:
        """Whether these devices may divide tensors among themselves."""
        if len(devices) < 2 or self is not TensorParallel.AUTO:
            return len(devices) < 2 or self is TensorParallel.ANY
        hosts = {cluster.device_by_name[name].host for name in devices}
        inside = [cluster.host_by_name[host].inside_bandwidth_bytes_per_s or 0.0 for host in hosts]
        return len(hosts) == 1 and inside[0] >= _FAST_BYTES_PER_S

    def allows_plan(self, plan: Plan) -> bool:
        """Whether all devices of a plan that divide tensors may do so."""
        return all(self.allows(plan.cluster, replica.devices) for stage in plan.stages for replica in stage.replicas)
