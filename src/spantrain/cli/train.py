"""`spantrain train`: a new run of a plan, or going on where an earlier one stopped."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.interrupt import graceful_interrupt
from spantrain.cli.options import Insecure, Json, Listen, NoNetwork, check_folder, print_json, session_options
from spantrain.config.json_codec import to_json
from spantrain.core.job import TrainJob
from spantrain.errors import ConfigError, Interrupted
from spantrain.schedule.registry import SCHEDULE_NAMES

if TYPE_CHECKING:
    from spantrain.app.session import SessionOptions
    from spantrain.app.train import TrainOutcome, TrainRequest

__all__ = ["train"]

_JOB_OPTIONS = tuple(field.name for field in fields(TrainJob) if field.name not in ("steps", "momentum"))
"""Options that make up the job; a resumed run has them from its checkpoint."""


def train(
    context: typer.Context,
    plan_path: Annotated[Path | None, typer.Argument(help="What `spantrain plan` wrote.")] = None,
    steps: Annotated[int, typer.Option(help="Steps in all, those before a resume included.", min=1)] = 100,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run; made when missing.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of an earlier run: go on from its checkpoint.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"{', '.join(SCHEDULE_NAMES)}; default: the plan's.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 3e-3,
    lr_schedule: Annotated[str, typer.Option(help="constant, or cosine down to zero at --decay-steps.")] = "constant",
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 10,
    decay_steps: Annotated[int, typer.Option(help="Where cosine ends.")] = 1000,
    weight_decay: Annotated[float, typer.Option(help="Of the optimizer.")] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(help="Clip to this global norm; 0: do not clip.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = 0,
    evaluate_every: Annotated[int, typer.Option(help="Steps between held-out evaluations; 0: never.")] = 0,
    trace_steps: Annotated[int, typer.Option(help="The last so many steps go into trace.json.")] = 3,
    tensorboard: Annotated[Path | None, typer.Option(help="Write TensorBoard scalars to this folder.")] = None,
    json_: Json = False,
    no_network: NoNetwork = False,
    listen: Listen = None,
    insecure: Insecure = False,
) -> None:
    """Train what a plan says, or go on where an earlier run stopped."""
    if (plan_path is None) == (resume is None):
        raise ConfigError("give either a plan file, or --resume RUN")
    for option, folder in (("--out", out), ("--tensorboard", tensorboard)):
        if folder is not None:
            check_folder(option, folder)
    if plan_path is not None:
        request = _new_run(context, plan_path, steps, schedule, out)
    else:
        assert resume is not None
        request = _resumed_run(context, resume, steps, out)
    options = session_options(no_network=no_network, listen=listen, insecure=insecure)
    _train(replace(request, tensorboard=tensorboard), options, json_)


def _new_run(
    context: typer.Context, plan_path: Path, steps: int, schedule: str | None, out: Path | None
) -> "TrainRequest":
    from spantrain.app.requests import new_run

    if out is None:
        raise ConfigError("give --out FOLDER for the run's checkpoint, trace and logs")
    given = {name: context.params[name] for name in _JOB_OPTIONS}
    given["max_grad_norm"] = given["max_grad_norm"] or None
    try:
        job = TrainJob(steps=steps, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return new_run(plan_path, job, schedule, out)


def _resumed_run(context: typer.Context, resume: Path, steps: int, out: Path | None) -> "TrainRequest":
    from spantrain.app.requests import resumed_run

    ignored = [name for name in ("schedule", *_JOB_OPTIONS) if _was_given(context, name)]
    if ignored:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise ConfigError(f"{names}: a resumed run has these from its checkpoint; leave them out, or start a new run")
    return resumed_run(resume, steps, out or resume)


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
    with graceful_interrupt(stop.ask), TerminalReporter(tables=not json_) as reporter:
        with open_session(run.cluster, run.devices, session_options, request.out / "logs", reporter) as session:
            outcome = train_plan(session, request, stop, reporter)
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
