"""`spantrain plan`: decide what runs where, on a profile or on a cluster that nobody measured."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.options import ClusterFile, Json, Preset, check_folder, chosen_cluster, print_json
from spantrain.config.json_codec import to_json
from spantrain.core.plan import WireFormat
from spantrain.errors import ConfigError, PlanError
from spantrain.planner.job import JobSpec
from spantrain.planner.request import Constraints, Objective, Quota, Restriction
from spantrain.schedule.registry import check_schedule

if TYPE_CHECKING:
    from spantrain.app.plan import PlanOutcome
    from spantrain.core.profile import Profile

__all__ = ["plan"]

_STATE_OF = {"sgd": "momentum"}
"""The optimizer by the state that it keeps: SGD is run with momentum."""

_QUOTA = re.compile(r"(?:(?P<site>[^/=]+)/)?(?P<kind>[^/=]+)=(?P<count>\d+)")
_NOT_IN_JSON = ("single_site_plan", "single_device_plan", "outer_plans")


def plan(
    global_batch: Annotated[int, typer.Option(help="Samples per optimizer step.", min=1)],
    profile_path: Annotated[
        Path | None, typer.Argument(help="What `spantrain profile` wrote; else --preset or --cluster with --model.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The plan file to write; left out: nothing is.")] = None,
    preset: Preset = None,
    cluster: ClusterFile = None,
    model: Annotated[str | None, typer.Option(help="With --preset or --cluster: the model, e.g. gpt2-small.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the profile's.")] = None,
    strategy: Annotated[str, typer.Option(help="`all`, or names with commas; default: the planner's own.")] = "",
    objective: Annotated[Objective, typer.Option(help="What is wanted least or most of.")] = Objective.THROUGHPUT,
    schedule: Annotated[
        str, typer.Option(help="Order of work the plan is made for; `auto`: try all on the best plans.")
    ] = "critical-path",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd: it decides the memory for its state.")] = "adamw",
    min_throughput: Annotated[float | None, typer.Option(help="Samples per second, at least.")] = None,
    max_step_s: Annotated[float | None, typer.Option(help="Seconds per step, at most.")] = None,
    max_money_per_step: Annotated[float | None, typer.Option(help="US dollars per step, at most.")] = None,
    max_money_per_hour: Annotated[float | None, typer.Option(help="US dollars per hour, at most.")] = None,
    quota: Annotated[
        list[str] | None, typer.Option(help="KIND=N or SITE/KIND=N: the most devices of a kind; repeatable.")
    ] = None,
    leave_out: Annotated[list[str] | None, typer.Option(help="A device or site not to use; repeatable.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A device or site that must be used; repeatable.")] = None,
    allow_wire: Annotated[
        list[WireFormat] | None, typer.Option("--allow-wire", help="What cuts between sites may be rounded to.")
    ] = None,
    allow_tensor_parallel: Annotated[
        bool, typer.Option("--allow-tensor-parallel", help="Devices of a host may divide tensors (not trained yet).")
    ] = False,
    allow_outer: Annotated[
        bool, typer.Option("--allow-outer", help="Sites may train by themselves, joined by an outer optimizer.")
    ] = False,
    outer_every: Annotated[int, typer.Option(help="Inner steps between two outer ones.", min=1)] = 100,
    restrict: Annotated[
        Restriction, typer.Option(help="megatron: only plans that Megatron-like frameworks run; for `auto`.")
    ] = Restriction.NONE,
    json_: Json = False,
) -> None:
    """Decide what runs where, predict it, and compare strategies, one device and one site."""
    from spantrain.app.plan import PlanWishes, make_plan, plan_file

    _check_out(out)
    job = JobSpec(
        global_batch=global_batch,
        optimizer=_STATE_OF.get(optimizer, optimizer),
        dtype=dtype,
        schedule="critical-path" if schedule == "auto" else check_schedule(schedule),
    )
    wishes = PlanWishes(
        objective=objective,
        constraints=Constraints(
            min_samples_per_s=min_throughput,
            max_step_s=max_step_s,
            max_usd_per_step=max_money_per_step,
            max_usd_per_hour=max_money_per_hour,
            quotas=tuple(_quota(text) for text in quota or ()),
            leave_out=tuple(leave_out or ()),
            keep=tuple(keep or ()),
            wire_formats=tuple(dict.fromkeys((WireFormat.NATIVE, *(allow_wire or ())))),
            tensor_parallel=allow_tensor_parallel,
        ),
        strategies=tuple(name.strip() for name in strategy.split(",") if name.strip()),
        any_schedule=schedule == "auto",
        restriction=restrict,
        allow_outer=allow_outer,
        outer_every=outer_every,
    )
    profile, profile_path = _profile(profile_path, preset, cluster, model, dtype)
    if out is None:
        outcome = make_plan(profile, job, wishes)
    else:
        outcome = plan_file(profile, profile_path, job, wishes, out)
    _show(outcome, profile, out, json_=json_)


def _profile(
    path: Path | None, preset: str | None, cluster: Path | None, model: str | None, dtype: str | None
) -> "tuple[Profile, Path | None]":
    """Return the profile that was measured, or one by data sheets, and the file that it is in."""
    described = preset is not None or cluster is not None
    if (path is not None) == described:
        raise ConfigError("give either a profile, or --preset NAME or --cluster FILE together with --model")
    if path is not None:
        from spantrain.config.artefacts import read_profile

        if model is not None:
            raise ConfigError(f"--model {model}: {path} has its model already; leave it out")
        return read_profile(path), path
    if model is None:
        raise ConfigError("--preset and --cluster need --model NAME, e.g. --model gpt2-small")
    if dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype}: give float32 or bfloat16")
    from spantrain.app.describe import described_profile
    from spantrain.models.catalog import resolve_model

    return described_profile(chosen_cluster(preset, cluster), resolve_model(model), dtype=dtype or "float32"), None


def _show(outcome: "PlanOutcome", profile: "Profile", out: Path | None, *, json_: bool) -> None:
    from spantrain.cli.render_plan import show_plan

    if json_:
        document = to_json(outcome)
        for name in _NOT_IN_JSON:
            del document[name]
        print_json(document)
    else:
        show_plan(outcome, profile)
    wrote = "Not written (--out FILE keeps it)" if out is None else f"Wrote {out}"
    trainable = out is not None and not profile.links_described and outcome.plan.outer is None
    next_ = "" if not trainable else f"; next: spantrain train {out} --steps 30 --out RUN"
    if out is not None and outcome.outer_plans:
        wrote += f" and the plans of {', '.join(outcome.outer_plans)} beside it"
    typer.echo(f"{wrote} after {outcome.search_s:.2f} s{next_}", err=True)


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name the file to write, e.g. {out / 'plan.json'}")
    check_folder("--out", out.parent)


def _quota(text: str) -> Quota:
    found = _QUOTA.fullmatch(text)
    if found is None:
        raise PlanError(f"--quota {text}: write KIND=N or SITE/KIND=N, e.g. --quota cloud/a100=4")
    return Quota(kind=found["kind"], count=int(found["count"]), site=found["site"])
