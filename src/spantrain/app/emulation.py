"""What of a run was emulated, whether emulated devices had the time that it needs, and what to do if not."""

from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan

__all__ = ["MOST_REAL_COMPUTE", "SOUND_REAL_COMPUTE", "too_fast", "what_is_emulated"]

SOUND_REAL_COMPUTE = 0.1
"""Real seconds per emulated second under which the machine below is hardly felt (DESIGN section 7)."""

MOST_REAL_COMPUTE = 0.3
"""Above this, times are this machine's rather than the emulated kind's."""


def too_fast(cluster: Cluster, ratio: float) -> str:
    """Say that real computation took too much of the emulated time, and which speed would leave it enough."""
    speed = cluster.emulated_speed * SOUND_REAL_COMPUTE / ratio
    return (
        f"Note: real computation took up to {ratio:.0%} of the emulated devices' time (it should be about "
        f"{SOUND_REAL_COMPUTE:.0%}), so times and predictions are partly this machine's. Gradients and losses are not "
        f"touched. Slower emulated devices mend it: spantrain profile ... --emulated-speed {speed:.1g}"
    )


def what_is_emulated(plan: Plan, network: str) -> str:
    """Say what of a run was emulated and what was real; `network` is `testbed`, `real` or another for loopback."""
    emulated = sum(plan.cluster.device_by_name[name].emulated for name in plan.devices)
    devices = (
        f"devices: {emulated} of {len(plan.devices)} emulated (real computation, made-up time)"
        if emulated
        else "devices: real"
    )
    links = {"testbed": "links: emulated (real TCP through a shaping router)", "real": "links: real"}
    text = f"{devices}; {links.get(network, 'links: loopback, unshaped')}; gradients, losses, messages: real"
    if emulated and any(len(replica.devices) > 1 for stage in plan.stages for replica in stage.replicas):
        text += "; sums inside replicas: real, each counted as the fastest of its size in an action"
    return text
