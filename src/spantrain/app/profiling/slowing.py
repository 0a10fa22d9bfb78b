"""How slow emulated devices have to be for real computation to hide in their time, and what a run says of emulation."""

import math
import time
from dataclasses import replace

import torch

from spantrain.app.profiling.describe import described_profile
from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.cost.analytic import AnalyticLaw
from spantrain.models.build import build_units, example_rows
from spantrain.models.execution.stage import StageExecutor
from spantrain.runtime.step.emulation import emulated_seconds

SOUND_REAL_COMPUTE = 0.1
"""Real seconds per emulated second under which the machine below is hardly felt (DESIGN section 7)."""

MAX_REAL_COMPUTE = 0.3
"""Above this, times are this machine's rather than the emulated kind's."""


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
    """Return what a sample alone takes a device at its kind's speed: what grows with slowness, and what stays."""
    kind = cluster.kind_by_name[device.kind]
    whole_s, half_s = (
        AnalyticLaw(kind=kind, speed=speed, dtype=dtype).training_seconds(graph.units, 1) for speed in (1.0, 0.5)
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
    if emulated and plan.divides_tensors:
        text += "; sums inside replicas: real, each counted as the fastest of its size in an action"
    return text


_REPEATS = 6
_LONGEST_STEP_S = 4.0
"""Devices are not slowed so far that a step takes longer: a first look should not take an hour."""
_KEEP = "--emulated-speed sets another"


def slowed(cluster: Cluster, model: ModelSpec, *, dtype: str, global_batch: int) -> tuple[Cluster, str]:
    """Return the cluster with emulated devices slow enough for this model, and what to say about it.

    Real computation should take a tenth of the emulated time at most (DESIGN section 7); else times and predictions
    are partly those of the machine below. The whole model is run here a few times, on one sample alone, which takes the
    most real time, and compared with the time of the fastest emulated kind. Where a step would become too long, the
    cluster stays as it is, and that is said.

    Raises:
        ConfigError: an unedited model cannot be built or followed.
    """
    units = described_profile(cluster, model, dtype=dtype).graph.units if cluster.emulated else ()
    laws = (emulated_seconds(cluster, device.name, dtype, units) for device in cluster.devices if device.emulated)
    emulated_s = [sum(seconds(op, 1) or 0.0 for op in (Op.FORWARD, Op.BACKWARD)) for seconds in laws]
    if not emulated_s or _step_s(emulated_s, global_batch) > _LONGEST_STEP_S:
        return cluster, ""
    real_s = real_seconds_per_sample(model, dtype)
    ratio = real_s / min(emulated_s)
    if ratio <= SOUND_REAL_COMPUTE:
        return cluster, ""
    graph = described_profile(cluster, model, dtype=dtype).graph
    speed = sound_speed(cluster, graph, real_s, dtype=dtype)
    power = 10.0 ** math.floor(math.log10(speed))
    speed = float(f"{math.floor(speed / power) * power:.1g}")  # the next smaller one with one digit that is not zero
    step_s = _step_s(emulated_s, global_batch) * cluster.emulated_speed / speed
    now = f"at {cluster.emulated_speed:g} of their kinds' speed real computation takes {ratio:.0%} of their time"
    if step_s > _LONGEST_STEP_S:
        return cluster, (
            f"Note: emulated devices: {now}, so times and predictions are partly this machine's; at {speed:g} they "
            f"would be the devices', with steps of {step_s:.0f} s or more ({_KEEP})"
        )
    return replace(cluster, emulated_speed=speed), (
        f"Emulated devices are slowed to {speed:g} of their kinds' speed: {now}, and {SOUND_REAL_COMPUTE:.0%} is the "
        f"most that hides in it ({_KEEP})"
    )


def real_seconds_per_sample(model: ModelSpec, dtype: str = "float32") -> float:
    """Return what forward and backward of a sample take a processor of this machine on one thread, as workers do.

    It is the least of a few times, and of the processor's time: what other programs of the machine do is not in it.

    Raises:
        ConfigError: an unedited model cannot be built or followed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        executor = StageExecutor(build_units(model, seed=0), is_last=True, global_batch=1, dtype=dtype)
        rows = example_rows(model, 1)
        taken_s = []
        for number in range(_REPEATS):
            span = Span(number, number + 1)
            start_s = time.process_time()
            executor.forward(span, (), rows)
            executor.backward(span, ())
            taken_s.append(time.process_time() - start_s)
    finally:
        torch.set_num_threads(threads)
    return min(taken_s)


def _step_s(emulated_s: list[float], global_batch: int) -> float:
    """Return what a step takes at least, if all devices share it with nothing lost."""
    return global_batch / sum(1 / seconds for seconds in emulated_s if seconds > 0)
