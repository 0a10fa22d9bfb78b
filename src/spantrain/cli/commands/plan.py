"""`spantrain plan`: decide what runs where, on a profile or on a cluster that nobody measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from spantrain.cli.commands import plan_options as options
from spantrain.cli.options import (
    ClusterFile,
    Data,
    Json,
    Preset,
    SequenceLength,
    Tokenizer,
    check_dtype,
    chosen_cluster,
    chosen_model,
    print_json,
)
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import check_can_write
from spantrain.errors import ConfigError, UsageError
from spantrain.planner.request import Objective, Restriction

if TYPE_CHECKING:
    from spantrain.core.profile import Profile
    from spantrain.planner.engine.outcome import PlanOutcome

_EITHER = "give either a profile, or --preset NAME or --cluster FILE together with --model"
_NOT_IN_JSON = ("single_site_plan", "single_device_plan", "outer_plans")


def plan(
    context: typer.Context,
    global_batch: options.GlobalBatch,
    profile_path: options.ProfilePath = None,
    out: options.PlanOut = None,
    preset: Preset = None,
    cluster: ClusterFile = None,
    model: options.Model = None,
    data: Data = None,
    tokenizer: Tokenizer = None,
    sequence_length: SequenceLength = None,
    dtype: options.Dtype = None,
    strategy: options.StrategyNames = "",
    objective: options.Wanted = Objective.THROUGHPUT,
    schedule: options.Schedule = "critical-path",
    optimizer: options.Optimizer = "adamw",
    min_throughput: options.MinThroughput = None,
    max_step_s: options.MaxStepS = None,
    max_money_per_step: options.MaxMoneyPerStep = None,
    max_money_per_hour: options.MaxMoneyPerHour = None,
    quota: options.Quotas = None,
    leave_out: options.LeaveOut = None,
    keep: options.Keep = None,
    allow_wire: options.AllowWire = None,
    allow_tensor_parallel: options.AllowTensorParallel = False,
    allow_sharded_state: options.AllowShardedState = False,
    recompute: options.Recompute = True,
    sequence_parallel: options.SequenceParallel = False,
    allow_outer: options.AllowOuter = False,
    outer_every: options.OuterEvery = 100,
    restrict: options.Restrict = Restriction.NONE,
    json_: Json = False,
) -> None:
    """Decide what runs where, predict it, and compare strategies, one device and one site."""
    from spantrain.app.training.run_folder import check_not_of_a_run
    from spantrain.planner.engine.engine import make_plan, write_plans

    if out is not None:
        check_can_write(out, "--out")
        check_not_of_a_run(out, "--out")
    job, wishes = options.job_of(context.params), options.wishes_of(context.params)
    if profile_path is None:
        profile = _described(context.params)
    else:
        profile = _measured(profile_path, context.params)
    outcome = make_plan(profile, job, wishes)
    try:
        if out is not None:
            outcome = write_plans(outcome, profile, profile_path, out)
    except UsageError:
        _show(outcome, profile, None, json_=json_)  # what was found is not lost with the place to write it
        raise
    _show(outcome, profile, out, json_=json_)


def _measured(path: Path, given: Mapping[str, Any]) -> "Profile":
    """Return the profile that was measured, which says for which model and data."""
    from spantrain.config.artefacts import read_profile

    if given["preset"] is not None or given["cluster"] is not None:
        raise ConfigError(_EITHER)
    for name in ("model", "data", "tokenizer", "sequence_length"):
        if given[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {given[name]}: {path} has its model and data already; leave it out")
    return read_profile(path)


def _described(given: Mapping[str, Any]) -> "Profile":
    """Return a profile by data sheets."""
    preset, cluster, model, dtype = (given[name] for name in ("preset", "cluster", "model", "dtype"))
    if preset is None and cluster is None:
        raise ConfigError(_EITHER)
    if model is None:
        raise ConfigError("--preset and --cluster need --model NAME, e.g. --model gpt2-small")
    if dtype is not None:
        check_dtype(dtype)
    from spantrain.app.profiling.describe import described_profile

    spec = chosen_model(
        model, data=given["data"], tokenizer=given["tokenizer"], sequence_length=given["sequence_length"]
    )
    return described_profile(chosen_cluster(preset, cluster), spec, dtype=dtype or "float32")


def _show(outcome: "PlanOutcome", profile: "Profile", out: Path | None, *, json_: bool) -> None:
    from spantrain.cli.render.plan import show_plan
    from spantrain.models.data.choice import user_functions

    if json_:
        document = to_json(outcome)
        for name in _NOT_IN_JSON:
            del document[name]
        print_json(document)
    else:
        show_plan(outcome, profile)
    wrote = "Not written (--out FILE keeps it)" if out is None else f"Wrote {out}"
    trainable = out is not None and not profile.links_described and outcome.plan.outer is None
    functions = "".join(f" --function {name}" for name in user_functions(outcome.plan.model))
    next_ = "" if not trainable else f"; next: spantrain train {out}{functions} --steps 30 --out RUN"
    if out is not None and outcome.outer_plans:
        wrote += f" and the plans of {', '.join(outcome.outer_plans)} beside it"
    typer.echo(f"{wrote} after {outcome.search_s:.2f} s{next_}", err=True)
