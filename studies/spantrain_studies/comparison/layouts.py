"""How another framework would be set up on a cluster: the devices that it can use, its stages, its micro-batches.

As plans, so that the memory model says where they do not fit and the simulator which micro-batches promise most. What
is kept of a user of these frameworks: equal batches for each device, equally many units for each stage, devices in the
order of the cluster, a few numbers of micro-batches tried. Where counts do not divide, the slowest devices are left out
until they do, and the layout says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage, SumModel
from spantrain.core.profile import Profile
from spantrain.core.shares import StateSharding
from spantrain.core.span import apportion, equal_spans
from spantrain.cost.sums import default_sums
from spantrain.errors import InfeasiblePlanError, PlanError, ScheduleError
from spantrain.planner.engine.evaluate import Evaluator
from spantrain_studies.comparison.worker.orders import Framework, FrameworkOrder

_BUCKETS_OF_MODEL = 4
"""Beside torch's own bucket, a quarter of the model is tried: ours are smaller than what torch's size is meant for."""
_SCHEDULES = {
    Framework.GPIPE: "gpipe",
    Framework.ONE_F_ONE_B: "1f1b",
    Framework.INTERLEAVED: "1f1b",
    Framework.ZERO_BUBBLE: "zb-h1",
    Framework.ZERO_BUBBLE_V: "zb-h1",
}
"""The nearest that our simulator has: it ranks numbers of micro-batches by it."""
_CHUNKS = 2
"""Stages of a device, for schedules that take several."""
_ONLY_IN_CHUNKS = (Framework.INTERLEAVED, Framework.ZERO_BUBBLE_V)
"""With one stage a device the first is `Schedule1F1B`, which has a row of its own, and torch refuses the second."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to set a framework up."""

    framework: Framework
    plan: Plan
    """The same as a plan, for its memory and what the simulator says of it."""
    cuts: tuple[tuple[int, int], ...]
    """Cuts of stages; a device may have two of them, which the plan has as one."""
    micro_batches: int
    bucket_bytes: int | None
    left_out: tuple[str, ...]

    @property
    def what(self) -> str:
        """Say it in a line."""
        plan = self.plan
        if self.framework.in_stages:
            size = plan.global_batch // self.micro_batches
            text = f"{len(self.cuts)} stages, {self.micro_batches} micro-batches of {size}"
        else:
            text = f"{plan.global_batch // len(plan.devices)} samples a device"
        if self.bucket_bytes is not None:
            text += f", buckets of {self.bucket_bytes / 2**20:.2g} MiB"
        return text + (f"; without {', '.join(self.left_out)}" if self.left_out else "")

    def order(self, profile: Profile, job: TrainJob) -> FrameworkOrder:
        """Return what each device is asked."""
        return FrameworkOrder(
            framework=self.framework,
            cluster=self.plan.cluster,
            model=self.plan.model,
            graph=profile.graph,
            job=job,
            global_batch=self.plan.global_batch,
            devices=self.plan.devices,
            cuts=self.cuts,
            micro_batches=self.micro_batches,
            bucket_bytes=self.bucket_bytes,
        )


def layouts(framework: Framework, profile: Profile, global_batch: int, evaluate: Evaluator) -> tuple[Layout, ...]:
    """Return all ways, the most promising first.

    Raises:
        InfeasiblePlanError: no two devices can run it.
    """
    devices = [device.name for device in profile.cluster.devices]
    for chosen in _subsets(profile.cluster, devices, len(profile.graph.units), framework):
        found = [layout for layout in _ways(framework, profile, global_batch, chosen) if _fits(layout, evaluate)]
        if found:
            found.sort(key=lambda layout: evaluate(layout.plan).step_s)
            return tuple(found)
    raise InfeasiblePlanError(
        f"{framework}: a batch of {global_batch} samples and {len(profile.graph.units)} units divide among no two or "
        f"more of these {len(devices)} devices, or do not fit into their memory; choose another --global-batch"
    )


def _subsets(cluster: Cluster, devices: Sequence[str], units: int, framework: Framework) -> Iterator[tuple[str, ...]]:
    """Yield devices to use, all of them first, then without the slowest ones; stages have a unit at least."""
    stages = _CHUNKS if framework in _ONLY_IN_CHUNKS else 1
    speed = {name: cluster.kind_by_name[cluster.device_by_name[name].kind].peak_fp32_flop_per_s for name in devices}
    by_speed = sorted(devices, key=lambda name: -speed[name])
    most = min(len(devices), units // stages) if framework.in_stages else len(devices)
    for count in range(most, 1, -1):
        kept = set(by_speed[:count])
        yield tuple(name for name in devices if name in kept)


def _ways(framework: Framework, profile: Profile, global_batch: int, devices: tuple[str, ...]) -> Iterator[Layout]:
    left_out = tuple(device.name for device in profile.cluster.devices if device.name not in devices)
    if framework.in_stages:
        for count in _micro_batch_counts(framework, global_batch, len(devices)):
            yield _staged(framework, profile, global_batch, devices, left_out, count)
    elif global_batch % len(devices) == 0:
        quarter = profile.graph.trained_bytes // _BUCKETS_OF_MODEL
        for bucket in (None, quarter) if framework is Framework.DDP else (None,):
            yield _whole(framework, profile, global_batch, devices, left_out, bucket)


def _micro_batch_counts(framework: Framework, global_batch: int, stages: int) -> list[int]:
    """Return numbers of equal micro-batches that torch's schedule takes.

    >>> _micro_batch_counts(Framework.ONE_F_ONE_B, 16, 4), _micro_batch_counts(Framework.ZERO_BUBBLE, 24, 5)
    ([4, 8, 16], [6, 8, 12, 24])
    >>> _micro_batch_counts(Framework.INTERLEAVED, 30, 4)
    [1, 2, 3, 5, 6, 10, 15]
    """
    counts = [count for count in range(1, global_batch + 1) if global_batch % count == 0]
    if framework in (Framework.ONE_F_ONE_B, Framework.ZERO_BUBBLE):
        counts = [count for count in counts if count >= stages]
    if framework in (Framework.INTERLEAVED, Framework.ZERO_BUBBLE):
        # They run in rounds of as many micro-batches as there are devices, or of more where that does not divide.
        counts = [count for count in counts if count % max(1, count // stages) == 0]
    return counts


def _fits(layout: Layout, evaluate: Evaluator) -> bool:
    try:
        return evaluate(layout.plan).fits
    except (PlanError, ScheduleError):
        return False


def _whole(
    framework: Framework,
    profile: Profile,
    global_batch: int,
    devices: tuple[str, ...],
    left_out: tuple[str, ...],
    bucket_bytes: int | None,
) -> Layout:
    units = len(profile.graph.units)
    own = global_batch // len(devices)
    stage = Stage(
        first_unit=0,
        end_unit=units,
        replicas=tuple(Replica(devices=(name,), sample_share=1.0, in_flight_limit=own) for name in devices),
        micro_batches=equal_spans(global_batch, global_batch),
        state_sharding=StateSharding.NONE if framework is Framework.DDP else StateSharding.ZERO3,
        sums=default_sums(SumModel.TORCH_DDP if framework is Framework.DDP else SumModel.TORCH_FSDP),
    )
    return Layout(
        framework=framework,
        plan=_plan(profile, global_batch, (stage,), "1f1b"),
        cuts=((0, units),),
        micro_batches=1,
        bucket_bytes=bucket_bytes,
        left_out=left_out,
    )


def _staged(
    framework: Framework,
    profile: Profile,
    global_batch: int,
    devices: tuple[str, ...],
    left_out: tuple[str, ...],
    micro_batches: int,
) -> Layout:
    units, count, size = len(profile.graph.units), len(devices), global_batch // micro_batches
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=(
                Replica(
                    devices=(devices[number],),
                    sample_share=1.0,
                    in_flight_limit=min(global_batch, size * _in_flight(framework, number, count, micro_batches)),
                ),
            ),
            micro_batches=equal_spans(global_batch, size),
        )
        for number, (first, end) in enumerate(_cuts(units, count))
    )
    twice = framework.many_stages and units >= _CHUNKS * count
    return Layout(
        framework=framework,
        plan=_plan(profile, global_batch, stages, _SCHEDULES[framework]),
        cuts=_cuts(units, _CHUNKS * count if twice else count),
        micro_batches=micro_batches,
        bucket_bytes=None,
        left_out=left_out,
    )


def _in_flight(framework: Framework, stage: int, stages: int, micro_batches: int) -> int:
    match framework:
        case Framework.GPIPE:
            return micro_batches
        case Framework.ONE_F_ONE_B:
            return stages - stage
        case Framework.INTERLEAVED:
            # Of half a stage each: a round through the first half, and twice the way to the last device and back.
            of_round = micro_batches // max(1, micro_batches // stages)
            return min(micro_batches, (of_round + 2 * (stages - 1 - stage)) // 2 + 1)
        case _:
            return stages


def _cuts(units: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Return equally many units for each stage, as near as can be.

    >>> _cuts(14, 4)
    ((0, 4), (4, 8), (8, 11), (11, 14))
    """
    ends = [0]
    for count in apportion(units, [1.0] * stages):
        ends.append(ends[-1] + count)
    return tuple(pairwise(ends))


def _plan(profile: Profile, global_batch: int, stages: tuple[Stage, ...], schedule: str) -> Plan:
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=global_batch,
        dtype="float32",
        stages=stages,
        schedule=schedule,
    )
