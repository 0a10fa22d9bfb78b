"""What weights one step old need of a plan, and what they do not go with: said before a run begins."""

from collections.abc import Iterator
from dataclasses import replace

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.cost.memory import MemoryCost, divisions_of
from spantrain.errors import PlanError
from spantrain.planner.engine.predict import optimizer_state


def check_staleness(plan: Plan, profile: Profile, job: TrainJob, *, own_loop: bool = False) -> None:
    """Refuse what cannot run with `job.staleness`.

    Raises:
        PlanError: a replica is a tensor-parallel group, the loss is scaled (float16), a second set of weights does not
            fit a device, or batches come from a user's own loop; all reasons are in the message.
    """
    problems = list(_problems(plan, profile, job, own_loop))
    if problems:
        raise PlanError(f"--staleness {job.staleness}: {'; '.join(problems)}; or train without it, exactly")


def _problems(plan: Plan, profile: Profile, job: TrainJob, own_loop: bool) -> Iterator[str]:
    if own_loop:
        yield "a loop of its own waits for every step's loss, so steps cannot overlap"
    groups = [
        "+".join(replica.devices) for stage in plan.stages for replica in stage.replicas if len(replica.devices) > 1
    ]
    if groups:
        yield f"tensor-parallel replicas ({', '.join(groups)}) run one step at a time; plan without tensor parallelism"
    if plan.dtype == "float16":
        yield "float16 scales the loss by what the step before said; plan with bfloat16 or float32"
    peaks = MemoryCost(profile, optimizer_state(job), plan.dtype, staleness=job.staleness).plan_peak_bytes(plan)
    for device, peak_bytes in peaks.items():
        has_bytes = profile.cluster.device_by_name[device].memory_bytes
        if peak_bytes > has_bytes:
            yield (
                f"{device} needs {format_bytes(peak_bytes)} with a second set of weights and gradients, it has "
                f"{format_bytes(has_bytes)}; plan with fewer units or fewer samples in flight there"
            )


def with_room_for_two(plan: Plan, profile: Profile, optimizer: str) -> Plan:
    """Let replicas that may hold their whole share of a step hold that of two, as far as memory goes.

    Limits below a step's share are somebody's wish, or all that fits; they stay. The optimizer has the name that
    `cost.memory` gives it.
    """
    memory = MemoryCost(profile, optimizer, plan.dtype, staleness=1)
    divisions = divisions_of(plan)

    def wider(stage: Stage, number: int) -> Replica:
        replica, spans = stage.replicas[number], stage.replica_spans(number)
        share = sum(span.size for span in spans)
        if replica.in_flight_limit < share or not spans:
            return replica
        largest = max(span.size for span in spans)
        fits = min(
            memory.in_flight_limit_for(stage.units, device, 2 * share, largest, division=divisions[device])
            for device in replica.devices
        )
        return replace(replica, in_flight_limit=max(replica.in_flight_limit, fits))

    stages = (
        replace(stage, replicas=tuple(wider(stage, number) for number in range(len(stage.replicas))))
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))
