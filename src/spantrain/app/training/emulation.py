"""What of a run was emulated, whether emulated devices had the time that it needs, and what to do if not."""

from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device
from spantrain.core.plan import Plan
from spantrain.core.units import UnitGraph
from spantrain.cost.analytic import AnalyticLaw

SOUND_REAL_COMPUTE = 0.1
"""Real seconds per emulated second under which the machine below is hardly felt (DESIGN section 7)."""

MOST_REAL_COMPUTE = 0.3
"""Above this, times are this machine's rather than the emulated kind's."""

_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SAMPLES = 1
"""Of the micro-batch that real and emulated time are compared at: one alone takes the most real time."""


def sound_speed(
    cluster: Cluster, graph: UnitGraph, real_s: float, *, dtype: str = "float32", at_once: float = 1.0
) -> float:
    """Return the largest `emulated_speed` at which real computation hides, the cluster's own if it is smaller.

    Args:
        cluster: at least one of its devices is emulated.
        graph: of the model.
        real_s: of forward and backward of one sample alone, on one processor.
        dtype: what products are computed in.
        at_once: so many devices as the fastest one share a processor.
    """
    emulated = [device for device in cluster.devices if device.emulated]
    work_s, fixed_s = min(_sample_seconds(cluster, device, graph, dtype) for device in emulated)
    wanted_s = real_s * at_once / SOUND_REAL_COMPUTE - fixed_s
    return min(cluster.emulated_speed, work_s / wanted_s) if wanted_s > 0 else cluster.emulated_speed


def _sample_seconds(cluster: Cluster, device: Device, graph: UnitGraph, dtype: str) -> tuple[float, float]:
    """Return what a sample takes a device at its kind's speed: what grows with slowness, and what stays."""
    kind = cluster.kind_by_name[device.kind]
    whole_s, half_s = (
        sum(AnalyticLaw(kind=kind, speed=speed, dtype=dtype).stage_seconds(graph.units, op, _SAMPLES) for op in _OPS)
        / _SAMPLES
        for speed in (1.0, 0.5)
    )
    work_s = half_s - whole_s
    return work_s, max(0.0, whole_s - work_s)


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
