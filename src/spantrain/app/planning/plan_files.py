"""Files of plans: read with the profile that they were made from, checked against each other; written beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from spantrain.config.artefacts import profile_of_plan, read_plan, reference_to_profile, write_plan, write_profile
from spantrain.config.files.problems import shortened
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Stage
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.core.units import ModelSpec
from spantrain.cost.held_sizes import divisions_of
from spantrain.cost.memory import MemoryCost
from spantrain.errors import PlanError, UsageError
from spantrain.formats.precision import LOW_WEIGHTS
from spantrain.models.catalog.catalog import CATALOG_FAMILIES, unit_names
from spantrain.models.sources import hf_configuration
from spantrain.planner.engine.outcome import PlanOutcome
from spantrain.schedule.registry import check_schedule

_AGAIN = "put the plan and the profile that it was made from together, or plan again with `spantrain plan`"
_MAX_BUCKETS = 4096
"""In which a stage sums gradients."""
_SAME = ("family", "sequence_length", "objective", "source_sha256", "rows")
"""Fields of a model that decide what its units are, beside its configuration."""


def open_plan(path: Path) -> tuple[Plan, Profile]:
    """Read a plan, and the profile that it names.

    Raises:
        PlanError: the plan is missing or wrong, or not for the profile; file, field and value are in the message.
        ProfileError: the profile is missing, wrong, or has changed since the plan was made.
    """
    plan = read_plan(path)
    profile = profile_of_plan(plan, path)
    check_fits_profile(plan, profile, where=f"{path}: ")
    return plan, profile


def under_schedule(plan: Plan, schedule: str | None) -> Plan:
    """Return a plan that runs in this schedule; None: in its own.

    An order of work that was found for its own schedule is left out.

    Raises:
        UsageError: there is no such schedule.
    """
    if schedule is None or check_schedule(schedule) == plan.schedule:
        return plan
    return replace(plan, schedule=schedule, hints=None)


def check_fits_profile(plan: Plan, profile: Profile, *, where: str = "") -> None:
    """Refuse a plan that is not for the units and devices of a profile; `where` begins the message.

    Raises:
        PlanError: it is for another model, another configuration of it, or devices that the profile does not have; or
            there is no such schedule.
    """
    try:
        check_schedule(plan.schedule)
        _check_units(profile)
    except UsageError as error:
        raise PlanError(f"{where}{error}") from None
    have, want = len(profile.graph.units), plan.stages[-1].end_unit
    if have != want or plan.model.name != profile.model.name:
        raise PlanError(
            f"{where}stages end at unit {want} of {plan.model.name} (stages[{len(plan.stages) - 1}].end_unit), the "
            f"profile has {profile.model.name} with {have} units; {_AGAIN}"
        )
    differ = sorted(differences(plan.model, profile.model, _SAME), key=itemgetter(0))
    if differ:
        shown = ((name, shortened(repr(own)), shortened(repr(other))) for name, own, other in differ[:5])
        told = ", ".join(f"{name} {own} (profile: {other})" for name, own, other in shown)
        raise PlanError(f"{where}the plan is for another {plan.model.name} than the profile: {told}; {_AGAIN}")
    _check_devices(plan, profile, where)
    _check_buckets(plan, profile, where)


def _check_units(profile: Profile) -> None:
    """Refuse a profile whose units are not the model's, as far as that is known without building it."""
    model = profile.model
    if model.family == "hf":
        hf_configuration(model)
    if model.family in CATALOG_FAMILIES and len(unit_names(model)) != len(profile.graph.units):
        raise UsageError(
            f"the profile has {len(profile.graph.units)} units, but {model.name} as it is configured there has "
            f"{len(unit_names(model))}; profile and plan again"
        )


def _check_buckets(plan: Plan, profile: Profile, where: str) -> None:
    for number, stage in enumerate(plan.stages):
        size_bytes = sum(profile.graph.units[unit].trained_bytes for unit in stage.units)
        if size_bytes > _MAX_BUCKETS * stage.sums.bucket_bytes:
            raise PlanError(
                f"{where}stages[{number}].sums.bucket_bytes: {stage.sums.bucket_bytes} makes over {_MAX_BUCKETS} "
                f"buckets of the {size_bytes} bytes of its gradients; give larger ones"
            )


def differences(
    one: ModelSpec, other: ModelSpec, names: Sequence[str], *, but: Sequence[str] = ()
) -> Iterator[tuple[str, object, object]]:
    """Yield which of these fields, and of those of their configurations `but` some, two models have not alike."""
    first, second = (
        {name: getattr(spec, name) for name in names}
        | {f"config.{key}": value for key, value in spec.config.items() if key not in but}
        for spec in (one, other)
    )
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def _check_devices(plan: Plan, profile: Profile, where: str) -> None:
    known = profile.cluster.device_by_name
    strangers = sorted(set(plan.devices) - set(known))
    if strangers:
        raise PlanError(
            f"{where}the plan uses {', '.join(strangers)}, which the profile's cluster does not have; {_AGAIN}"
        )
    for name in plan.devices:
        mine, theirs = plan.cluster.device_by_name[name], known[name]
        if (mine.kind, mine.host, mine.site) != (theirs.kind, theirs.host, theirs.site):
            raise PlanError(
                f"{where}{name} is a {mine.kind} on {mine.host} at {mine.site} in the plan, a {theirs.kind} on "
                f"{theirs.host} at {theirs.site} in the profile; {_AGAIN}"
            )


def check_staleness(plan: Plan, profile: Profile, job: TrainJob, *, own_loop: bool = False) -> None:
    """Refuse what cannot run with `job.staleness`.

    Raises:
        PlanError: devices have several stages, a replica is a tensor-parallel group, the loss is scaled (float16), a
            second set of weights does not fit a device, or batches come from a user's own loop; all reasons are in the
            message.
    """
    problems = list(_problems(plan, profile, job, own_loop))
    if problems:
        raise PlanError(f"--staleness {job.staleness}: {'; '.join(problems)}; or train without it, exactly")


def _problems(plan: Plan, profile: Profile, job: TrainJob, own_loop: bool) -> Iterator[str]:
    if own_loop:
        yield "a loop of its own waits for every step's loss, so steps cannot overlap"
    if plan.interleaved:
        yield "devices have several stages each, and an order for one step; plan with --no-interleaving"
    groups = [
        "+".join(replica.devices) for stage in plan.stages for replica in stage.replicas if len(replica.devices) > 1
    ]
    if groups:
        yield f"tensor-parallel replicas ({', '.join(groups)}) run one step at a time; plan without tensor parallelism"
    divided = [f"stage {index}" for index, stage in enumerate(plan.stages) if stage.divides_state]
    if divided:
        yield (
            f"replicas that divide the optimizer's state ({', '.join(divided)}) take each other's rows between steps; "
            "plan with another strategy than zero1"
        )
    if any(stage.offloads for stage in plan.stages):
        yield "state in a host's memory (offload) is of one step; plan without it"
    if plan.dtype == "float16":
        yield "float16 scales the loss by what the step before said; plan with bfloat16 or float32"
    if plan.dtype == LOW_WEIGHTS:
        yield f"{LOW_WEIGHTS} has one rounded copy of the weights; plan with bfloat16"
    peaks = MemoryCost(profile, job.optimizer_state, plan.dtype, staleness=job.staleness).plan_peak_bytes(plan)
    for device, peak_bytes in peaks.items():
        has_bytes = profile.cluster.device_by_name[device].memory_bytes
        if peak_bytes > has_bytes:
            yield (
                f"{device} needs {format_bytes(peak_bytes)} with a second set of weights and gradients, it has "
                f"{format_bytes(has_bytes)}; plan with fewer units or fewer samples in flight there"
            )


def with_room_for_two(plan: Plan, profile: Profile, optimizer: str) -> Plan:
    """Let replicas that may hold their whole share of a step hold that of two, as far as memory goes.

    Limits below a step's share are somebody's choice, or all that fits; they stay. The optimizer has the name that
    `cost.memory` gives it.
    """
    memory = MemoryCost(profile, optimizer, plan.dtype, staleness=1)
    divisions = divisions_of(plan)

    def limit_of(stage: Stage, number: int) -> int:
        limit, share = stage.replicas[number].in_flight_limit, stage.samples_of(number)
        return max(limit, memory.limit_in(stage, number, divisions, steps=2)) if 0 < share <= limit else limit

    limits = ([limit_of(stage, number) for number in range(len(stage.replicas))] for stage in plan.stages)
    return plan.with_limits(limits)


def write_plans(outcome: PlanOutcome, profile: Profile, profile_path: Path | None, out: Path) -> PlanOutcome:
    """Write what was planned beside a reference to its profile, and return it with that.

    A profile that is in no file is written next to the plan. Where groups train by themselves, the plan of each is
    written beside, as `plan.GROUP.json`.

    Raises:
        UsageError: a file cannot be written.
    """
    if profile_path is None:
        profile_path = out.with_name(f"{out.stem}.profile.json")
        write_profile(profile, profile_path)
    reference = reference_to_profile(profile_path, out)
    plan = replace(outcome.plan, profile=reference)
    for group, (local, report) in outcome.outer_plans.items():
        write_plan(replace(local, profile=reference), out.with_name(f"{out.stem}.{group}.json"), report)
    write_plan(plan, out, outcome.report)
    return replace(outcome, plan=plan)
