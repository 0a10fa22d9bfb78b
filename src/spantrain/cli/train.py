"""`spantrain train`: a new run of a plan, or going on where an earlier one stopped."""

import datetime
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.interrupt import graceful_interrupt
from spantrain.cli.options import (
    ClusterFile,
    Data,
    Dtype,
    Insecure,
    Json,
    Listen,
    NoNetwork,
    Preset,
    SequenceLength,
    Tokenizer,
    check_dtype,
    check_folder,
    chosen_cluster,
    chosen_model,
    print_json,
    session_options,
)
from spantrain.config.json_codec import to_json
from spantrain.core.job import TrainJob
from spantrain.errors import ConfigError, Interrupted
from spantrain.models.data_choice import user_functions
from spantrain.schedule.registry import SCHEDULE_NAMES, check_schedule

if TYPE_CHECKING:
    from spantrain.app.quick import QuickRequest
    from spantrain.app.session import SessionOptions
    from spantrain.app.train import TrainOutcome, TrainRequest

__all__ = ["train"]

_NO_OPTIONS = ("steps", "momentum", "adam_beta1", "adam_beta2", "adam_epsilon", "loss_scale")
_JOB_OPTIONS = tuple(field.name for field in fields(TrainJob) if field.name not in _NO_OPTIONS)
"""Options that make up the job; a resumed run has them from its checkpoint."""
_QUICK_OPTIONS = ("preset", "cluster", "data", "tokenizer", "sequence_length", "global_batch", "dtype")
"""Options that go with --model: a plan and a checkpoint say all this already."""


def train(
    context: typer.Context,
    plan_path: Annotated[Path | None, typer.Argument(help="What `spantrain plan` wrote.")] = None,
    model: Annotated[str | None, typer.Option(help="Without a plan: measure, plan and train this model.")] = None,
    preset: Preset = None,
    cluster: ClusterFile = None,
    data: Data = None,
    tokenizer: Tokenizer = None,
    sequence_length: SequenceLength = None,
    global_batch: Annotated[int, typer.Option(help="With --model: samples per optimizer step.", min=1)] = 32,
    dtype: Dtype = "float32",
    steps: Annotated[int, typer.Option(help="Steps in all, those before a resume included.", min=1)] = 100,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run; made when missing.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of an earlier run: go on from its checkpoint.")] = None,
    other_plan: Annotated[Path | None, typer.Option("--plan", help="With --resume: go on under this plan.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"{', '.join(SCHEDULE_NAMES)}; default: the plan's.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 3e-3,
    lr_schedule: Annotated[
        str, typer.Option(help="constant; cosine or linear: down to zero at --decay-steps.")
    ] = "constant",
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 10,
    decay_steps: Annotated[int, typer.Option(help="Where cosine and linear end.")] = 1000,
    weight_decay: Annotated[float, typer.Option(help="Of the optimizer.")] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(help="Clip to this global norm; 0: do not clip.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = 0,
    keep_checkpoints: Annotated[int, typer.Option(help="So many stay, the newest.", min=1)] = 2,
    evaluate_every: Annotated[int, typer.Option(help="Steps between held-out evaluations; 0: never.")] = 0,
    trace_steps: Annotated[int, typer.Option(help="The last so many steps go into trace.json.")] = 3,
    tensorboard: Annotated[Path | None, typer.Option(help="Write TensorBoard scalars to this folder.")] = None,
    json_: Json = False,
    no_network: NoNetwork = False,
    listen: Listen = None,
    insecure: Insecure = False,
) -> None:
    """Train what a plan says, or go on where an earlier run stopped."""
    if sum(given is not None for given in (plan_path, model, resume)) != 1:
        raise ConfigError("give a plan file, or --model NAME with --preset or --cluster, or --resume RUN")
    for option, folder in (("--out", out), ("--tensorboard", tensorboard)):
        if folder is not None:
            check_folder(option, folder)
    options = session_options(no_network=no_network, listen=listen, insecure=insecure)
    if resume is None:
        _refuse(context, ("other_plan",), "belongs to --resume; a new run takes the plan's file alone")
    if model is not None:
        _train_from_scratch(_quick_request(context, model, out), options, json_)
        return
    _refuse(context, _QUICK_OPTIONS, "a plan and a checkpoint say this already; leave it out, or give --model")
    if resume is not None:
        request = _resumed_run(context, resume, other_plan, steps, out)
    else:
        assert plan_path is not None
        request = _new_run(context, plan_path, steps, schedule, out)
    _train(replace(request, tensorboard=tensorboard, keep_checkpoints=keep_checkpoints), options, json_)


def _new_run(
    context: typer.Context, plan_path: Path, steps: int, schedule: str | None, out: Path | None
) -> "TrainRequest":
    from spantrain.app.requests import new_run

    if out is None:
        raise ConfigError("give --out FOLDER for the run's checkpoint, trace and logs")
    return new_run(plan_path, _job(context, steps), schedule, out)


def _job(context: typer.Context, steps: int) -> TrainJob:
    given = {name: context.params[name] for name in _JOB_OPTIONS}
    given["max_grad_norm"] = given["max_grad_norm"] or None
    try:
        return TrainJob(steps=steps, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _quick_request(context: typer.Context, model: str, out: Path | None) -> "QuickRequest":
    given = context.params
    cluster = chosen_cluster(given["preset"], given["cluster"])
    check_dtype(given["dtype"])
    spec = chosen_model(
        model, data=given["data"], tokenizer=given["tokenizer"], sequence_length=given["sequence_length"]
    )
    job = _job(context, given["steps"])
    schedule = check_schedule(given["schedule"] or "critical-path")
    from spantrain.app.quick import QuickRequest, run_folder_for

    return QuickRequest(
        cluster=cluster,
        model=spec,
        job=job,
        out=out or run_folder_for(spec, datetime.datetime.now()),
        global_batch=given["global_batch"],
        dtype=given["dtype"],
        schedule=schedule,
        tensorboard=given["tensorboard"],
        keep_checkpoints=given["keep_checkpoints"],
    )


def _resumed_run(
    context: typer.Context, resume: Path, plan: Path | None, steps: int, out: Path | None
) -> "TrainRequest":
    from spantrain.app.requests import has_own_job, resumed_run

    if not has_own_job(resume):
        return resumed_run(resume, steps, out or resume, plan_path=plan, job=_job(context, steps))
    _refuse(
        context,
        ("schedule", *_JOB_OPTIONS),
        "a resumed run has these from its checkpoint; leave them out, or start a new run",
    )
    return resumed_run(resume, steps, out or resume, plan_path=plan)


def _refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    options = {param.name: param.opts[0] for param in context.command.params}
    given = [options[name] for name in names if _was_given(context, name)]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _train(request: "TrainRequest", session_options: "SessionOptions", json_: bool) -> None:
    from spantrain.app.session import open_session
    from spantrain.app.train import StopRequest
    from spantrain.app.train import train as train_plan
    from spantrain.cli.render import TerminalReporter

    stop = StopRequest()
    run = request.plan
    session_options = replace(session_options, functions=user_functions(run.model))
    with graceful_interrupt(stop.ask), TerminalReporter(tables=not json_) as reporter:
        with open_session(run.cluster, run.devices, session_options, request.out / "logs", reporter) as session:
            outcome = train_plan(session, request, stop, reporter)
        reporter.show_training(outcome, run)
    if json_:
        print_json(to_json(outcome))
    _say_how_it_ended(outcome)


def _train_from_scratch(request: "QuickRequest", session_options: "SessionOptions", json_: bool) -> None:
    from spantrain.app.quick import quick_train
    from spantrain.app.train import StopRequest
    from spantrain.cli.render import TerminalReporter

    stop = StopRequest()
    with graceful_interrupt(stop.ask), TerminalReporter(tables=not json_) as reporter:
        reporter.note(f"The run's folder: {request.out}")
        outcome, run = quick_train(request, session_options, stop, reporter)
        reporter.show_training(outcome, run)
    if json_:
        print_json(to_json(outcome))
    _say_how_it_ended(outcome)


def _say_how_it_ended(outcome: "TrainOutcome") -> None:
    if outcome.interrupted:
        raise Interrupted(
            f"{outcome.steps} steps done; checkpoint: {outcome.checkpoint}; go on with: spantrain train --resume "
            f"{Path(outcome.checkpoint).parent.parent} --steps N"
        )
