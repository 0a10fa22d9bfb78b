"""What a schedule does: on even stages with made-up seconds, or on a plan with its profile's."""

from collections.abc import Mapping
from pathlib import Path

from spantrain.app.planning.plan_files import open_plan, under_schedule
from spantrain.config.artefacts import read_plan
from spantrain.config.files.text_files import read_text
from spantrain.core.action import SPLIT_OPS
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.records import Record
from spantrain.core.span import equal_spans
from spantrain.core.trace import Trace
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, PlanError, ScheduleError
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import Orders, check_orders
from spantrain.schedule.registry import check_schedule
from spantrain.schedule.render.text import parse_orders
from spantrain.sim.bounds import pipeline_bound_s
from spantrain.sim.costs import ProfileCosts, StepCosts, TableCosts
from spantrain.sim.engine import simulate
from spantrain.sim.search.interleaved import with_interleaved_order
from spantrain.sim.search.model import Room

_MAX_SECONDS = 1e6
_KIND = DeviceKind(
    name="even",
    peak_fp16_flop_per_s=1.0,
    peak_fp32_flop_per_s=1.0,
    memory_bytes=1,
    memory_bandwidth_bytes_per_s=1.0,
    power_w=0.0,
    source="made up: F, I and W take a second each",
)


class EvenPipeline(Record):
    """Equal devices; F, I and W of a micro-batch take a second each on all of a device's stages together."""

    stages: int
    """Devices: each has a stage, or several."""
    chunks: int = 1
    """Stages of each device, in turn."""
    back: bool = False
    """Whether there are two, and the second ones go back from the last device to the first."""
    micro_batches: int
    """Micro-batches of one sample each."""
    transfer_s: float = 0.0
    """How long a micro-batch keeps a link busy, in either direction."""
    latency_s: float = 0.0
    in_flight: int | None = None
    """Micro-batches that a stage may hold, up to W; None: all."""

    def __post_init__(self) -> None:
        for name, least in (("stages", 1), ("chunks", 1), ("micro_batches", 1), ("transfer_s", 0), ("latency_s", 0)):
            if not least <= getattr(self, name) <= _MAX_SECONDS:
                raise ConfigError(
                    f"{name} must be a number from {least} to {_MAX_SECONDS:g}, got {getattr(self, name)}"
                )
        if self.in_flight is not None and self.in_flight < 1:
            raise ConfigError(f"in_flight must be at least 1 micro-batch, got {self.in_flight}")
        if self.back and self.chunks != 2:
            raise ConfigError(f"back is for two stages on each device, got {self.chunks}: give --chunks 2")

    @property
    def limit(self) -> int:
        """Micro-batches that a stage may hold."""
        return self.micro_batches if self.in_flight is None else self.in_flight

    @property
    def places(self) -> list[int]:
        """The device of each stage."""
        there = list(range(self.stages))
        return there + there[::-1] if self.back else there * self.chunks


class ShownSchedule(Record):
    """What a schedule does in one step."""

    schedule: str
    step_s: float
    """With the sum of gradients, the update and the barrier, where the costs have them."""
    pipeline_s: float
    """From the first start to the end of the last action."""
    lower_bound_s: float
    """Less than any order of work takes from first start to last end."""
    devices: tuple[tuple[str, ...], ...]
    """By stage; of devices with several, by the first."""
    stages: tuple[tuple[int, ...], ...]
    """By the same, all stages of these devices."""
    bubble_ratio: tuple[float, ...]
    """By the same: the part of the step in which its devices wait, in the mean."""
    peak_samples: Mapping[str, int]
    """By device: the most samples held at once, up to W."""
    orders: Orders
    trace: Trace

    @property
    def ratio_to_bound(self) -> float:
        """How many times as long as the lower bound the pipeline takes."""
        return self.pipeline_s / self.lower_bound_s if self.lower_bound_s else 1.0


def show_even(schedule: str, pipeline: EvenPipeline) -> ShownSchedule:
    """Run a schedule on equal stages.

    Raises:
        UsageError: there is no such schedule.
        PlanError: the in-flight limit is too small for a static order.
    """
    third = dict.fromkeys(SPLIT_OPS, 1.0 / pipeline.chunks)
    cuts = len(pipeline.places) - 1
    costs = TableCosts(
        sample_s=(third,) * (cuts + 1),
        latency_s=(pipeline.latency_s,) * cuts,
        forward_s=(pipeline.transfer_s,) * cuts,
        backward_s=(pipeline.transfer_s,) * cuts,
    )
    plan = even_plan(check_schedule(schedule), pipeline)
    if plan.interleaved and schedule == "critical-path":
        room = {
            name: Room(
                size_bytes=pipeline.limit * pipeline.chunks, sample_bytes=dict.fromkeys(plan.crew_of(name).numbers, 1.0)
            )
            for name in plan.devices
        }
        found = with_interleaved_order(plan, costs, room)
        if found is None:
            raise PlanError(f"no order holds {pipeline.limit} micro-batches or fewer: give --in-flight with more")
        plan = found
    return _shown(plan, costs, steps=1)


def show_plan(schedule: str, plan_path: Path) -> ShownSchedule:
    """Run a schedule, in the place of its own, on a plan with the costs of the plan's profile.

    Raises:
        UsageError: there is no such schedule, or no such plan or profile, or they are wrong.
        PlanError: an in-flight limit is too small for a static order.
        ScheduleError: the plan's limits stop the pipeline.
    """
    check_schedule(schedule)
    plan, profile = open_plan(plan_path)
    return _shown(under_schedule(plan, schedule), ProfileCosts(profile, plan), steps=3)


def check_order_file(path: Path, plan_path: Path | None = None) -> Orders:
    """Return the order that a text file holds, if it does all work once, within memory, and can run.

    The plan says which micro-batches and limits each replica has; without one, they are those of the order itself.

    Raises:
        UsageError: the file is missing or not an order, or the order is wrong; the action that fails is named.
    """
    text = read_text(path, remedy="write one with `spantrain schedule show NAME --order FILE`")
    try:
        orders = parse_orders(text)
        layout = _layout_of(orders) if plan_path is None else CutLayout.of(read_plan(plan_path))
        check_orders(orders, layout)
    except ScheduleError as error:
        raise PlanError(f"{path}: {error}; mend the order") from error
    return orders


def _layout_of(orders: Orders) -> CutLayout:
    """Return the layout in which an order has nothing missing but what it leaves half done."""
    crews = [tuple(sorted({action.stage for order in row for action in order})) for row in orders]
    rows = {stage: row for stages, row in zip(crews, orders, strict=True) for stage in stages}
    if sorted(rows) != list(range(len(rows))):
        raise ScheduleError(f"the order has stages {', '.join(map(str, sorted(rows)))}, wanted all from 0 on")
    spans = tuple(
        tuple(tuple(sorted({action.span for action in order if action.stage == stage})) for order in rows[stage])
        for stage in range(len(rows))
    )
    return CutLayout(
        shared=tuple(crews) if len(crews) < len(rows) else (),
        micro_batches=tuple(tuple(sorted({span for own in row for span in own})) for row in spans),
        spans=spans,
        limits=tuple(tuple(sum(span.size for span in own) for own in row) for row in spans),
    )


def _shown(plan: Plan, costs: StepCosts, *, steps: int) -> ShownSchedule:
    result = simulate(plan, costs, steps=steps)
    last = max((interval.step for interval in result.trace.intervals), default=0)
    return ShownSchedule(
        schedule=plan.schedule,
        step_s=result.step_s,
        pipeline_s=result.pipeline_s,
        lower_bound_s=pipeline_bound_s(plan, costs),
        devices=tuple(crew.devices for crew in plan.crews),
        stages=tuple(crew.numbers for crew in plan.crews),
        bubble_ratio=tuple(
            sum(result.bubble_ratio[device] for device in crew.devices) / len(crew.devices) for crew in plan.crews
        ),
        peak_samples=dict(result.peak_in_flight),
        orders=tuple(tuple(result.orders[one.devices[0]] for one in crew.first.replicas) for crew in plan.crews),
        trace=result.trace.since(last),
    )


def even_plan(schedule: str, pipeline: EvenPipeline) -> Plan:
    """Return the plan of equal stages."""
    names = tuple(f"d{stage}" for stage in range(pipeline.stages))
    return Plan(
        cluster=Cluster(
            name="even",
            kinds=(_KIND,),
            sites=(Site(name="even", hosts=names, bandwidth_bytes_per_s=1.0, latency_s=pipeline.latency_s),),
            hosts=tuple(Host(name=name, site="even", devices=(name,)) for name in names),
            devices=tuple(
                Device(name=name, kind="even", host=name, site="even", backend="emulated", memory_bytes=1)
                for name in names
            ),
            links=(),
        ),
        model=ModelSpec(name="even", family="none", config={}, dataset="none"),
        global_batch=pipeline.micro_batches,
        dtype="float32",
        stages=tuple(
            Stage(
                first_unit=index,
                end_unit=index + 1,
                replicas=(Replica(devices=(names[place],), sample_share=1.0, in_flight_limit=pipeline.limit),),
                micro_batches=equal_spans(pipeline.micro_batches, 1),
            )
            for index, place in enumerate(pipeline.places)
        ),
        schedule=schedule,
    )
