"""Made-up plans: stages of one unit on devices that only exist in a test, and some over the laptop preset."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spantrain.config.artefacts import reference_to_profile, write_plan
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.schedule.dispatch.machine import ReplicaTask
from spantrain.schedule.registry import replica_tasks

KIND = DeviceKind(
    name="made-up",
    peak_fp16_flop_per_s=1.0,
    peak_fp32_flop_per_s=1.0,
    memory_bytes=1,
    memory_bandwidth_bytes_per_s=1.0,
    power_w=1.0,
    source="a test",
)

Row = tuple[Sequence[Span], Sequence[float], Sequence[int]]
"""Of a stage: micro-batches, and each replica's sample share and in-flight limit."""


def stage_and_replica(plan: Plan, device: str) -> tuple[int, int]:
    """Return the first stage that a device serves, and in which replica."""
    crew = plan.crew_of(device)
    return crew.numbers[0], crew.replica_index(device)


def task_of(plan: Plan, device: str) -> ReplicaTask:
    """Return what the replica that a device leads is told of a plan."""
    crew = plan.crew_of(device)
    task = replica_tasks(plan)[plan.crews.index(crew)][crew.replica_index(device)]
    assert isinstance(task, ReplicaTask)
    return task


def interleaved(plan: Plan, *, there_and_back: bool = False) -> Plan:
    """Return a plan of as many stages whose second half is on the devices of the first, in turn or back again."""
    half = len(plan.stages) // 2
    first, second = plan.stages[:half], plan.stages[half:]
    over = reversed(first) if there_and_back else first
    again = (
        replace(stage, replicas=own.replicas, micro_batches=own.micro_batches)
        for stage, own in zip(second, over, strict=True)
    )
    return replace(plan, stages=(*first, *again))


def plan_of(rows: Sequence[Row], schedule: str = "compact") -> Plan:
    names = [f"s{stage}r{replica}" for stage, row in enumerate(rows) for replica in range(len(row[1]))]
    stages = tuple(
        Stage(
            first_unit=index,
            end_unit=index + 1,
            replicas=tuple(
                Replica(devices=(f"s{index}r{number}",), sample_share=share, in_flight_limit=limit)
                for number, (share, limit) in enumerate(zip(shares, limits, strict=True))
            ),
            micro_batches=tuple(spans),
        )
        for index, (spans, shares, limits) in enumerate(rows)
    )
    cluster = Cluster(
        name="test",
        kinds=(KIND,),
        sites=(Site(name="here", hosts=("one",), bandwidth_bytes_per_s=1.0, latency_s=0.0),),
        hosts=(Host(name="one", site="here", devices=tuple(names)),),
        devices=tuple(
            Device(name=name, kind="made-up", host="one", site="here", backend="emulated", memory_bytes=1)
            for name in names
        ),
        links=(),
    )
    return Plan(
        cluster=cluster,
        model=ModelSpec(name="none", family="gpt2", config={}, dataset="stdlib-text"),
        global_batch=max(span.hi for span in rows[0][0]),
        dtype="float32",
        stages=stages,
        schedule=schedule,
    )


LAPTOP_PLACES = ((0, 5, {"lab-0": 1.0}), (5, 9, {"office-nx": 2.0, "office-tx2": 1.0}), (9, 14, {"home-tx2": 1.0}))


def laptop_plan(profile: Profile, schedule: str = "critical-path", global_batch: int = 24) -> Plan:
    """Return gpt2-tiny on four of the laptop preset's devices, at its three sites."""
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=tuple(
                Replica(devices=(name,), sample_share=share, in_flight_limit=global_batch)
                for name, share in places.items()
            ),
            micro_batches=equal_spans(global_batch, 6),
        )
        for first, end, places in LAPTOP_PLACES
    )
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=global_batch,
        dtype="float32",
        stages=stages,
        schedule=schedule,
    )


PLACES = ((3, ("office-nx",)), (6, ("office-tx2",)), (10, ("lab-0", "lab-1")), (0, ("home-tx2", "home-nano")))


def over_all_places(profile: Profile) -> Plan:
    """Four stages over all three places; the last one ends with the model."""
    stages, first = [], 0
    for end, devices in PLACES:
        end = end or len(profile.graph.units)
        shares = (3.0, 1.0) if "home-nano" in devices else (1.0, 1.0)
        replicas = tuple(
            Replica(devices=(name,), sample_share=share, in_flight_limit=64)
            for name, share in zip(devices, shares, strict=False)
        )
        stages.append(Stage(first_unit=first, end_unit=end, replicas=replicas, micro_batches=equal_spans(64, 8)))
        first = end
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=64,
        dtype="float32",
        stages=tuple(stages),
        schedule="critical-path",
    )


def written(plan: Plan, profile_path: Path, path: Path) -> Path:
    write_plan(replace(plan, profile=reference_to_profile(profile_path, path)), path)
    return path
