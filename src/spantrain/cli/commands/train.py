"""`spantrain train`: a new run of a plan, or going on where an earlier one stopped."""

import contextlib
import datetime
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from spantrain.cli.commands import train_options as options
from spantrain.cli.failure import graceful_interrupt
from spantrain.cli.options import (
    ClusterFile,
    Data,
    Dtype,
    EmulatedSpeed,
    Functions,
    Insecure,
    Json,
    Listen,
    LostAfter,
    NetworkTraceName,
    NoNetwork,
    Preset,
    SequenceLength,
    Tokenizer,
    at_speed,
    check_dtype,
    chosen_cluster,
    chosen_functions,
    chosen_model,
    chosen_trace,
    print_json,
    session_options,
)
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import check_can_make, is_file
from spantrain.core.job import TrainJob
from spantrain.core.outer.stages import OuterCluster
from spantrain.errors import ConfigError, Interrupted, PeerLostError, PlanError, WorkerError
from spantrain.models.data.choice import user_functions
from spantrain.schedule.registry import check_schedule

if TYPE_CHECKING:
    from spantrain.app.training.outcome import TrainOutcome
    from spantrain.app.training.session import SessionOptions
    from spantrain.app.training.train import StopRequest, TrainRequest
    from spantrain.app.training.train_from_scratch import QuickRequest

_FILES = ("plan.json", "profile.json", "run.json", "trace.json", "decisions.jsonl", "switches.jsonl")
_NO_OPTIONS = ("steps", "momentum", "adam_beta1", "adam_beta2", "adam_epsilon", "loss_scale")
_JOB_OPTIONS = tuple(field.name for field in fields(TrainJob) if field.name not in _NO_OPTIONS)
"""Options that make up the job; a resumed run has them from its checkpoint."""
_QUICK_OPTIONS = (
    "preset", "cluster", "data", "tokenizer", "sequence_length", "global_batch", "dtype", "emulated_speed",
)  # fmt: skip
"""Options that go with --model: a plan and a checkpoint say all this already."""
_WHERE_OPTIONS = (
    "other_plan", "keep_checkpoints", "tensorboard", "no_network", "network_trace", "listen", "lost_after", "insecure",
)  # fmt: skip
"""Options that a run that goes on needs again: no checkpoint has them."""


def train(
    context: typer.Context,
    plan_path: options.PlanPath = None,
    model: options.Model = None,
    preset: Preset = None,
    cluster: ClusterFile = None,
    from_scratch: options.FromScratch = False,
    data: Data = None,
    tokenizer: Tokenizer = None,
    sequence_length: SequenceLength = None,
    global_batch: options.GlobalBatch = 32,
    dtype: Dtype = "float32",
    emulated_speed: EmulatedSpeed = None,
    steps: options.Steps = 100,
    out: options.RunFolder = None,
    overwrite: options.Overwrite = False,
    resume: options.ResumeRun = None,
    other_plan: options.OtherPlan = None,
    function: Functions = None,
    schedule: options.Schedule = None,
    optimizer: options.Optimizer = "adamw",
    learning_rate: options.LearningRate = 3e-3,
    lr_schedule: options.LrSchedule = "constant",
    warmup_steps: options.WarmupSteps = 10,
    decay_steps: options.DecaySteps = 1000,
    weight_decay: options.WeightDecay = 0.01,
    max_grad_norm: options.MaxGradNorm = 1.0,
    seed: options.Seed = 0,
    checkpoint_every: options.CheckpointEvery = 0,
    keep_checkpoints: options.KeepCheckpoints = 2,
    evaluate_every: options.EvaluateEvery = 0,
    trace_steps: options.TraceSteps = 3,
    tensorboard: options.Tensorboard = None,
    adapter: options.Adapter = "auto",
    allow_wire: options.AllowWire = None,
    staleness: options.Staleness = 0,
    json_: Json = False,
    no_network: NoNetwork = False,
    network_trace: NetworkTraceName = None,
    listen: Listen = None,
    lost_after: LostAfter = None,
    insecure: Insecure = False,
) -> None:
    """Train what a plan says, or go on where an earlier run stopped; under `spantrain outer run` as a cluster of it."""
    _check_words(context)
    where = session_options(no_network=no_network, listen=listen, insecure=insecure, lost_after=lost_after)
    trace = chosen_trace(network_trace, emulated=not no_network and listen is None)
    if model is not None:
        request = replace(_quick_request(context, model, out), network_trace=trace, outer=_outer_cluster())
        _train_from_scratch(context, request, where, json_)
    else:
        _train(context, replace(_request(context), network_trace=trace, outer=_outer_cluster()), where, json_)


def _outer_cluster() -> OuterCluster | None:
    """Return which cluster of an outer optimizer this run was started as, if any."""
    from spantrain.app.outer.run import outer_cluster

    return outer_cluster()


def _check_words(context: typer.Context) -> None:
    """Refuse options that do not go together, and folders that cannot be written to."""
    given = context.params
    if sum(given[name] is not None for name in ("plan_path", "model", "resume")) != 1:
        raise ConfigError("give a plan file, or --model NAME with --preset or --cluster, or --resume RUN")
    if given["out"] or given["resume"]:
        option = "--out" if given["out"] else "--resume"
        check_can_make(given["out"] or given["resume"], option, files=_FILES, folders=("checkpoint", "logs"))
    if given["tensorboard"]:
        check_can_make(given["tensorboard"], "--tensorboard")
    if given["resume"] is None:
        _refuse(context, ("other_plan",), "belongs to --resume; a new run takes the plan's file alone")
    else:
        _refuse(context, ("from_scratch",), "a resumed run has the weights of its checkpoint; leave it out")
    _check_run_folder(given["out"], given["resume"], overwrite=given["overwrite"])
    if given["model"] is not None:
        _refuse(context, ("function",), "--model, --data and the model's own loss are called without it; leave it out")
    else:
        _refuse(context, _QUICK_OPTIONS, "a plan and a checkpoint say this already; leave it out, or give --model")


def _check_run_folder(out: Path | None, resume: Path | None, *, overwrite: bool) -> None:
    """Refuse a folder that holds another run than the one that goes on."""
    from spantrain.app.training.old_run import refuse_run

    goes_on = out is None or (resume is not None and out.resolve() == resume.resolve())
    if overwrite and goes_on:
        raise ConfigError("--overwrite: belongs to --out with a folder that holds another run; leave it out")
    if out is not None and not goes_on and not overwrite:
        refuse_run(out, f"go on with it by --resume {out}, name another --out, or remove the old run by --overwrite")


def _request(context: typer.Context) -> "TrainRequest":
    """Return what a plan, or an earlier run, says is to be trained."""
    given = context.params
    if given["resume"] is not None:
        request = _resumed_run(context, given["resume"], given["other_plan"], given["steps"], given["out"])
    else:
        request = _new_run(context, given["plan_path"], given["steps"], given["schedule"], given["out"])
    return replace(request, tensorboard=given["tensorboard"], keep_checkpoints=given["keep_checkpoints"])


def _new_run(
    context: typer.Context, plan_path: Path, steps: int, schedule: str | None, out: Path | None
) -> "TrainRequest":
    from spantrain.app.training.requests import new_run

    if out is None:
        if not is_file(plan_path):
            raise PlanError(f"{plan_path}: there is no such file; make a plan with `spantrain plan`")
        raise ConfigError("give --out FOLDER for the run's checkpoint, trace and logs")
    functions = chosen_functions(context.params["function"])
    return new_run(
        plan_path,
        _job(context, steps),
        out,
        functions=functions,
        schedule=schedule,
        from_scratch=context.params["from_scratch"],
    )


def _job(context: typer.Context, steps: int) -> TrainJob:
    given = {name: context.params[name] for name in _JOB_OPTIONS}
    given["max_grad_norm"] = given["max_grad_norm"] or None
    given["allow_wire"] = tuple(dict.fromkeys(given["allow_wire"] or ()))
    if given["staleness"] and not _was_given(context, "adapter"):
        given["adapter"] = "off"
    try:
        return TrainJob(steps=steps, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _quick_request(context: typer.Context, model: str, out: Path | None) -> "QuickRequest":
    given = context.params
    cluster = chosen_cluster(given["preset"], given["cluster"])
    if given["emulated_speed"] is not None:
        cluster = at_speed(cluster, given["emulated_speed"])
    check_dtype(given["dtype"])
    spec = chosen_model(
        model, data=given["data"], tokenizer=given["tokenizer"], sequence_length=given["sequence_length"], read=False
    )
    job = _job(context, given["steps"])
    schedule = check_schedule(given["schedule"] or "critical-path")
    from spantrain.app.training.train_from_scratch import QuickRequest, run_folder_for

    return QuickRequest(
        cluster=cluster,
        own_speed=given["emulated_speed"] is not None,
        model=spec,
        job=job,
        out=out or run_folder_for(spec, datetime.datetime.now()),
        global_batch=given["global_batch"],
        dtype=given["dtype"],
        schedule=schedule,
        tensorboard=given["tensorboard"],
        keep_checkpoints=given["keep_checkpoints"],
        from_scratch=given["from_scratch"],
        overwrite=given["overwrite"],
    )


def _resumed_run(
    context: typer.Context, resume: Path, plan: Path | None, steps: int, out: Path | None
) -> "TrainRequest":
    from spantrain.app.training.requests import has_own_job, resumed_run

    functions = chosen_functions(context.params["function"])
    if not has_own_job(resume):
        job = _job(context, steps)
        return resumed_run(resume, steps, out or resume, functions=functions, plan_path=plan, job=job)
    _refuse(
        context,
        ("schedule", *_JOB_OPTIONS),
        "a resumed run has these from its checkpoint; leave them out, or start a new run",
    )
    return resumed_run(resume, steps, out or resume, functions=functions, plan_path=plan)


def _refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    options = {param.name: param.opts[0] for param in context.command.params}
    given = [options[name] for name in names if _was_given(context, name)]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _train(context: typer.Context, request: "TrainRequest", session_options: "SessionOptions", json_: bool) -> None:
    from spantrain.app.training.old_run import remove_old_run
    from spantrain.app.training.session import open_session
    from spantrain.app.training.train import train as train_plan
    from spantrain.cli.render.render import TerminalReporter

    run = request.plan
    if context.params["overwrite"]:
        remove_old_run(request.out, keep=context.params["plan_path"])
    session_options = replace(session_options, functions=user_functions(run.model))
    with _going_on(context, request.out) as stop, TerminalReporter(tables=not json_) as reporter:
        with open_session(run.cluster, run.devices, session_options, request.out / "logs", reporter) as session:
            outcome = train_plan(session, request, stop, reporter)
        reporter.show_training(outcome, run, request.report)
    _end(context, outcome, json_)


def _train_from_scratch(
    context: typer.Context, request: "QuickRequest", session_options: "SessionOptions", json_: bool
) -> None:
    from spantrain.app.training.train_from_scratch import quick_train
    from spantrain.cli.render.render import TerminalReporter

    with _going_on(context, request.out) as stop, TerminalReporter(tables=not json_) as reporter:
        outcome, trained = quick_train(request, session_options, stop, reporter)
        reporter.show_training(outcome, trained.plan, trained.report)
    _end(context, outcome, json_)


def _end(context: typer.Context, outcome: "TrainOutcome", json_: bool) -> None:
    if json_:
        print_json(to_json(outcome))
    if outcome.interrupted:
        command = _command_to_resume(context, Path(outcome.checkpoint))
        raise Interrupted(f"{outcome.steps} steps done; checkpoint: {outcome.checkpoint}; go on with: {command}")


@contextmanager
def _going_on(context: typer.Context, out: Path) -> Iterator["StopRequest"]:
    """Say from where to go on, if a run is interrupted or lost."""
    from spantrain.app.training.train import StopRequest

    stop = StopRequest()
    try:
        with graceful_interrupt(stop.ask, lambda: _where_to_go_on(context, out)):
            yield stop
    except (PeerLostError, WorkerError) as error:
        if not stop.begun:
            raise
        raise type(error)(f"{error}\n{_where_to_go_on(context, out)}") from None


def _where_to_go_on(context: typer.Context, out: Path) -> str:
    from spantrain.runtime.checkpoint.manifest import latest_checkpoint

    for folder in (out, context.params["resume"]):
        with contextlib.suppress(ConfigError):
            if folder is not None:
                found = latest_checkpoint(folder)
                moved = ("--out", str(out)) if folder != out else ()
                return (
                    f"the newest complete checkpoint is {found}; go on with: "
                    f"{_command_to_resume(context, found, *moved)}"
                )
    return "there is no checkpoint to go on from; --checkpoint-every N writes them"


def _command_to_resume(context: typer.Context, checkpoint: Path, *more: str) -> str:
    """Return the command that goes on in the same way from the newest checkpoint of a run's folder."""
    from spantrain.runtime.checkpoint.manifest import read_manifest

    folder = checkpoint.parent.parent
    words = ["spantrain", "train", "--resume", str(folder), *more, "--steps", str(context.params["steps"])]
    for name in user_functions(read_manifest(checkpoint, check_files=False).model):
        words += ["--function", name]
    for param in context.command.params:
        value = context.params.get(str(param.name))
        if param.name in _WHERE_OPTIONS and _was_given(context, param.name):
            words += [param.opts[0]] if value is True else [param.opts[0], str(value)]
    return shlex.join(words)
