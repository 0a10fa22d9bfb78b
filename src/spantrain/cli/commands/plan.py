"""`spantrain plan`: decide what runs where, on a profile or on a cluster that nobody measured."""

import re
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli import options as shared
from spantrain.cli.commands.rent import RentOptions, check_rent_options, rent_command
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import check_can_write
from spantrain.errors import ConfigError, PlanError, UsageError
from spantrain.formats.registry import WireFormat
from spantrain.planner.dividing import TensorParallel
from spantrain.planner.request import Constraints, JobSpec, Objective, Quota, Restriction
from spantrain.schedule.registry import check_schedule

if TYPE_CHECKING:
    from spantrain.app.planning.batches import BatchRow
    from spantrain.core.profile import Profile
    from spantrain.planner.engine.outcome import PlanOptions, PlanOutcome

_EITHER = "give either a profile, or --preset NAME or --cluster FILE together with --model"
_NOT_IN_JSON = ("single_site_plan", "outer_plans")
_QUOTA = re.compile(r"(?:(?P<site>[^/=]+)/)?(?P<kind>[^/=]+)=(?P<count>\d+)")
_ANY = "auto"
"""As a schedule: all are tried."""


class PlanArguments(RentOptions, shared.ModelOptions):
    """The options of `spantrain plan`."""

    global_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|LEAST..MOST",
            help="Samples per optimizer step, or a range in which learning allows any; may be left out with --offers.",
        ),
    ] = None
    profile_path: Annotated[
        Path | None, typer.Argument(help="What `spantrain profile` wrote; else --preset or --cluster with --model.")
    ] = None
    out: Annotated[Path | None, "The plan file to write; left out: nothing is."] = None
    preset: shared.Preset = None
    cluster: shared.ClusterFile = None
    model: Annotated[str | None, "With --preset or --cluster: the model, e.g. gpt2-small."] = None
    dtype: Annotated[str | None, "float32 or bfloat16; default: the profile's."] = None
    strategy: Annotated[str, "`all`, or names with commas; default: the planner's own."] = ""
    objective: Annotated[Objective, "What is wanted least or most of."] = Objective.THROUGHPUT
    schedule: Annotated[str, "Order of work the plan is made for; `auto`: try all on the best plans."] = "critical-path"
    optimizer: shared.Optimizer = "adamw"
    min_throughput: Annotated[float | None, "Samples per second, at least."] = None
    max_step_s: Annotated[float | None, "Seconds per step, at most."] = None
    max_money_per_step: Annotated[float | None, "US dollars per step, at most."] = None
    max_money_per_hour: Annotated[float | None, "US dollars per hour, at most."] = None
    quota: Annotated[list[str] | None, "KIND=N or SITE/KIND=N: the most devices of a kind; repeatable."] = None
    leave_out: Annotated[list[str] | None, "A device or site not to use; repeatable."] = None
    keep: Annotated[list[str] | None, "A device or site that must be used; repeatable."] = None
    allow_wire: Annotated[list[WireFormat] | None, "What cuts between sites may be rounded to."] = None
    tensor_parallel: Annotated[
        TensorParallel, "Hosts in which auto may divide tensors; auto: those with fast links inside."
    ] = TensorParallel.AUTO
    allow_sharded_state: Annotated[bool, "Replicas may divide state (ZeRO), whatever it gains."] = False
    recompute: Annotated[bool, "Compute activations again where memory is short."] = True
    recompute_all: Annotated[bool, "Compute all activations again: gradient checkpointing."] = False
    sequence_parallel: Annotated[bool, "Devices that divide tensors hold slices of the sequence too."] = False
    allow_outer: Annotated[bool, "Groups may train by themselves, joined by an outer optimizer."] = False
    outer_every: Annotated[int, typer.Option(help="Inner steps between two outer ones.", min=1, max=10**9)] = 100
    restrict: Annotated[Restriction, "megatron: only plans that Megatron-like frameworks run; for `auto`."] = (
        Restriction.NONE
    )
    second_level: Annotated[
        bool, "spantrain: without them, a group is one stage of even shares; says what that costs."
    ] = True
    interleaving: Annotated[bool, "Devices may have several stages, if auto finds it faster."] = True
    mtbf: Annotated[
        str | None,
        "Mean hours between two losses of a device, HOURS and/or KIND=HOURS with commas: what is lost counts.",
    ] = None
    json_: shared.Json = False

    def batches(self) -> tuple[int, ...]:
        """Return the global batches that may be.

        Raises:
            ConfigError: there is none, or no number.
        """
        from spantrain.app.planning.batches import batches_of

        if self.global_batch is None:
            raise ConfigError("--global-batch N: say how many samples an optimizer step has")
        return batches_of(self.global_batch, shared.MAX_SAMPLES)

    def job(self, global_batch: int) -> JobSpec:
        """Return what is to be planned for.

        Raises:
            UsageError: a value is not one of those that there are.
        """
        return JobSpec(
            global_batch=global_batch,
            optimizer=shared.planned_state(self.optimizer),
            dtype=self.dtype,
            schedule="critical-path" if self.schedule == _ANY else check_schedule(self.schedule),
        )

    def options(self) -> "PlanOptions":
        """Return what a plan is to be like.

        Raises:
            PlanError: a value makes no sense, or two contradict each other.
        """
        from spantrain.planner.engine.outcome import PlanOptions

        strategies = tuple(name.strip() for name in self.strategy.split(",") if name.strip())
        if self.strategy and not strategies:
            raise PlanError(f"--strategy {self.strategy!r}: names no strategy; write names with commas, or `all`")
        if "interleaved" in strategies and not self.interleaving:
            raise PlanError("--strategy interleaved and --no-interleaving contradict each other; leave one out")
        return PlanOptions(
            objective=self.objective,
            constraints=self._constraints(),
            strategies=strategies,
            any_schedule=self.schedule == _ANY,
            restriction=self.restrict,
            allow_outer=self.allow_outer,
            outer_every=self.outer_every,
        )

    def _constraints(self) -> Constraints:
        return Constraints(
            min_samples_per_s=_limit("--min-throughput", self.min_throughput),
            max_step_s=_limit("--max-step-s", self.max_step_s),
            max_usd_per_step=_limit("--max-money-per-step", self.max_money_per_step),
            max_usd_per_hour=_limit("--max-money-per-hour", self.max_money_per_hour),
            quotas=tuple(_quota(text) for text in self.quota or ()), leave_out=tuple(self.leave_out or ()),
            keep=tuple(self.keep or ()),
            wire_formats=tuple(dict.fromkeys((WireFormat.NATIVE, *(self.allow_wire or ())))),
            tensor_parallel=self.tensor_parallel, recompute=self.recompute, recompute_all=self.recompute_all,
            sequence_parallel=self.sequence_parallel, sharded_state=self.allow_sharded_state,
            second_level=self.second_level, interleaving=self.interleaving and self.mtbf is None,
        )  # fmt: skip

    def profile(self) -> "Profile":
        """Return the profile that was measured, which says for which model and data; or one by data sheets.

        Raises:
            UsageError: options contradict each other, or something is missing or wrong.
        """
        if self.profile_path is None:
            if self.preset is None and self.cluster is None:
                raise ConfigError(_EITHER)
            if self.model is None:
                raise ConfigError("--preset and --cluster need --model NAME, e.g. --model gpt2-small")
            if self.dtype is not None:
                shared.check_dtype(self.dtype)
            from spantrain.app.profiling.describe import described_profile

            spec = self.chosen_model(self.model)
            cluster = shared.chosen_cluster(self.preset, self.cluster)
            return shared.priced(described_profile(cluster, spec, dtype=self.dtype or "float32"), self.prices)
        if self.preset is not None or self.cluster is not None:
            raise ConfigError(_EITHER)
        for name in ("model", *(one.name for one in fields(shared.ModelOptions))):
            value = getattr(self, name)
            if value:
                given = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                raise ConfigError(f"{given}: {self.profile_path} has its model and data already; leave it out")
        from spantrain.config.artefacts import read_profile

        return shared.priced(read_profile(self.profile_path), self.prices)


@shared.with_options(PlanArguments)
def plan(asked: PlanArguments, context: typer.Context) -> None:
    """Decide what runs where, predict it, and compare strategies, one device and one site; or what to rent."""
    check_rent_options(asked, context)
    if asked.offers is not None:
        rent_command(asked)
        return
    from spantrain.app.planning.batches import plan_for_any
    from spantrain.app.planning.plan_files import write_plans
    from spantrain.app.training.run_record import check_not_of_a_run
    from spantrain.cli.render.text import console_for_people
    from spantrain.planner.engine.engine import make_plan

    out = asked.out
    if out is not None:
        check_can_write(out, "--out")
        check_not_of_a_run(out, "--out")
    batches = asked.batches()
    job, options = asked.job(batches[0]), asked.options()
    profile = asked.profile()
    if asked.mtbf is not None:
        from spantrain.app.simulation.liveput import preferring

        options = replace(options, prefer=preferring(asked.mtbf, profile, job.optimizer))
    rows: tuple[BatchRow, ...] = ()
    with console_for_people(stderr=True).status("Planning") as status:  # on a terminal
        options = replace(options, heard=lambda count: status.update(f"Planning: {count} plans simulated"))
        if len(batches) == 1:
            outcome = make_plan(profile, job, options)
        else:
            outcome, rows = plan_for_any(profile, job, options, batches, lambda row: typer.echo(row, err=True))
    try:
        if out is not None:
            outcome = write_plans(outcome, profile, asked.profile_path, out)
    except UsageError:
        _show(outcome, profile, None, rows, json_=asked.json_)  # what was found is not lost with the place to write it
        raise
    _show(outcome, profile, out, rows, json_=asked.json_)


def _show(
    outcome: "PlanOutcome", profile: "Profile", out: Path | None, rows: tuple["BatchRow", ...], *, json_: bool
) -> None:
    from spantrain.cli.render.plan import show_plan
    from spantrain.models.data.choice import user_functions

    if json_:
        document = to_json(outcome)
        for name in _NOT_IN_JSON:
            del document[name]
        report = document.pop("report")
        document["plan"] |= report
        document["reasons"] = report["reasons"]
        if rows:
            document["batches"] = to_json(rows)
        shared.print_json(document)
    else:
        show_plan(outcome, profile)
    wrote = "Not written (--out FILE keeps it)" if out is None else f"Wrote {out}"
    trainable = out is not None and not profile.links_described and outcome.plan.outer is None
    functions = "".join(f" --function {quote(name)}" for name in user_functions(outcome.plan.model))
    next_ = "" if not trainable else f"; next: spantrain train {quote(str(out))}{functions} --steps 30 --out RUN"
    if out is not None and outcome.outer_plans:
        wrote += f" and the plans of {', '.join(outcome.outer_plans)} beside it"
    typer.echo(f"{wrote} after {outcome.search_s:.2f} s{next_}", err=True)


def _limit(option: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise PlanError(f"{option} {value:g}: give a number over 0, or leave it out")
    return value


def _quota(text: str) -> Quota:
    found = _QUOTA.fullmatch(text)
    if found is None:
        raise PlanError(f"--quota {text}: write KIND=N or SITE/KIND=N, e.g. --quota cloud/a100=4")
    return Quota(kind=found["kind"], count=int(found["count"]), site=found["site"])
