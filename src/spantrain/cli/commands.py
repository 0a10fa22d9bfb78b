"""The commands: parse, call the use case, show what came out. Nothing here imports torch until it is needed."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spantrain.cli.interrupt import clean_interrupt, graceful_interrupt
from spantrain.cli.options import (
    ClusterFile,
    Insecure,
    Json,
    Listen,
    NoNetwork,
    Out,
    Preset,
    at_speed,
    check_folder,
    chosen_cluster,
)
from spantrain.config.json_codec import to_json
from spantrain.core.job import TrainJob
from spantrain.errors import ConfigError, Interrupted
from spantrain.schedule.registry import check_schedule

if TYPE_CHECKING:
    from spantrain.app.session import SessionOptions
    from spantrain.app.train import TrainOutcome, TrainRequest

__all__ = ["demo", "groups", "plan", "profile", "train", "worker"]

_STATE_OF = {"sgd": "momentum"}
"""The optimizer by the state that it keeps: SGD is run with momentum."""

ProfilePath = Annotated[Path, typer.Argument(help="What `spantrain profile` wrote.")]


def demo(
    out: Out = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="Training steps.", min=10)] = 60,
    json_: Json = False,
    no_network: NoNetwork = False,
) -> None:
    """Train a real model across three emulated places: measured, planned, predicted, compared."""
    from spantrain.app.demo import DemoOptions, run_demo
    from spantrain.cli.render import TerminalReporter, show_demo_summary
    from spantrain.config.json_codec import render_json

    check_folder("--out", out)
    options = DemoOptions(steps=steps)
    with clean_interrupt("the demonstration"), TerminalReporter(tables=not json_) as reporter:
        summary = run_demo(options, _session(no_network=no_network), out, reporter)
    document = to_json(summary)
    (out / "summary.json").write_text(render_json(document) + "\n")
    show_demo_summary(summary, stderr=json_)
    if json_:
        _print_json(document)


def profile(
    model: Annotated[str, typer.Option(help="The model, e.g. gpt2-tiny.")],
    out: Out,
    preset: Preset = None,
    cluster: ClusterFile = None,
    data: Annotated[Path | None, typer.Option(help="Your own text, a file or a folder.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 (autocast).")] = "float32",
    max_samples: Annotated[int, typer.Option(help="Largest micro-batch that is measured.", min=1, max=1024)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds of measuring the network.", min=1, max=100)] = 1,
    emulated_speed: Annotated[
        float | None,
        typer.Option(help="Fraction of their kind's speed at which emulated devices run, for this profile."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure compute again even if it is cached.")] = False,
    json_: Json = False,
    no_network: NoNetwork = False,
    listen: Listen = None,
    insecure: Insecure = False,
) -> None:
    """Measure the compute of every device and the network between all of them."""
    chosen = chosen_cluster(preset, cluster)
    if emulated_speed is not None:
        chosen = at_speed(chosen, emulated_speed)
    check_folder("--out", out)
    _check_dtype(dtype)
    from spantrain.models.catalog import resolve_model

    spec = resolve_model(model, data_path=data)
    from spantrain.app.profile import ProfileOptions, measure_profile
    from spantrain.app.session import open_session
    from spantrain.cli.render import TerminalReporter
    from spantrain.config.artefacts import write_profile

    options = ProfileOptions(dtype=dtype, max_samples=max_samples, network_rounds=rounds, use_cache=not fresh)
    names = tuple(device.name for device in chosen.devices)
    session_options = _session(no_network=no_network, listen=listen, insecure=insecure)
    with (
        clean_interrupt("profiling"),
        TerminalReporter(tables=not json_) as reporter,
        open_session(chosen, names, session_options, out / "logs", reporter) as session,
    ):
        result = measure_profile(session, spec, options, reporter)
    write_profile(result, out / "profile.json")
    if json_:
        _print_json(
            {
                "profile": str(out / "profile.json"),
                "devices": {entry.device: entry.score for entry in result.scores},
                "links": [to_json(link) for link in result.links],
                "compute_s": result.provenance.compute_s,
                "network_s": result.provenance.network_s,
            }
        )
    else:
        reporter.show_profile(result)
        reporter.note(f"Wrote {out / 'profile.json'}; next: spantrain groups {out / 'profile.json'}")


def groups(profile_path: ProfilePath, json_: Json = False) -> None:
    """Print the devices grouped by network and, within, by compute and memory."""
    from spantrain.config.artefacts import read_profile
    from spantrain.planner.groups import group_devices
    from spantrain.planner.tree import tree_lines

    found = read_profile(profile_path)
    grouped = group_devices(found)
    if json_:
        _print_json(to_json(grouped))
        return
    for line in tree_lines(grouped, found):
        typer.echo(line)


def plan(
    profile_path: ProfilePath,
    global_batch: Annotated[int, typer.Option(help="Samples per optimizer step.", min=1)],
    out: Annotated[Path, typer.Option("--out", help="The plan file to write.")],
    schedule: Annotated[str, typer.Option(help="Order of work the plan is made for.")] = "critical-path",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd: it decides the memory for its state.")] = "adamw",
    leave_out: Annotated[list[str] | None, typer.Option(help="A device or site not to use; repeatable.")] = None,
    json_: Json = False,
) -> None:
    """Decide what runs where, predict it, and compare it with one device and one site."""
    from spantrain.app.plan import plan_file
    from spantrain.cli.render import TerminalReporter
    from spantrain.planner.job import JobSpec

    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name the file to write, e.g. {out / 'plan.json'}")
    check_folder("--out", out.parent)
    job = JobSpec(
        global_batch=global_batch,
        optimizer=_STATE_OF.get(optimizer, optimizer),
        schedule=check_schedule(schedule),
        leave_out=tuple(leave_out or ()),
    )
    outcome = plan_file(profile_path, job, out)
    if json_:
        document = to_json(outcome)
        for name in ("single_site_plan", "single_device_plan"):
            del document[name]
        _print_json(document)
        return
    reporter = TerminalReporter(tables=True)
    reporter.show_plan(outcome)
    reporter.note(f"Wrote {out} after {outcome.search_s:.2f} s; next: spantrain train {out} --steps 30 --out RUN")


def train(
    plan_path: Annotated[Path | None, typer.Argument(help="What `spantrain plan` wrote.")] = None,
    steps: Annotated[int, typer.Option(help="Steps in all, those before a resume included.", min=1)] = 100,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run; made when missing.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of an earlier run: go on from its checkpoint.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="critical-path, compact, 1f1b or gpipe; default: the plan's.")
    ] = None,
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
        if out is None:
            raise ConfigError("give --out FOLDER for the run's checkpoint, trace and logs")
        try:
            job = TrainJob(
                steps=steps,
                seed=seed,
                optimizer=optimizer,
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                warmup_steps=warmup_steps,
                lr_schedule=lr_schedule,
                decay_steps=decay_steps,
                max_grad_norm=max_grad_norm or None,
                checkpoint_every=checkpoint_every,
                evaluate_every=evaluate_every,
                trace_steps=trace_steps,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        from spantrain.app.requests import new_run

        request = new_run(plan_path, job, schedule, out)
    else:
        from spantrain.app.requests import resumed_run

        assert resume is not None
        request = resumed_run(resume, steps, out or resume)
    _train(
        replace(request, tensorboard=tensorboard),
        _session(no_network=no_network, listen=listen, insecure=insecure),
        json_,
    )


def worker(
    join: Annotated[str, typer.Option(envvar="SPANTRAIN_JOIN", help="The coordinator's HOST:PORT.")],
    token: Annotated[str, typer.Option(envvar="SPANTRAIN_TOKEN", help="What the coordinator printed.")],
    name: Annotated[str | None, typer.Option(help="This device's name in the cluster file.")] = None,
    backend: Annotated[str | None, typer.Option(help="cpu, cuda:N or emulated; default: cuda if there is one.")] = None,
    data_address: Annotated[str | None, typer.Option(help="Where the others reach this machine.")] = None,
    insecure: Insecure = False,
) -> None:
    """Serve one device of this machine to a coordinator."""
    from spantrain.app.worker import serve

    with clean_interrupt("the worker"):
        serve(join=join, token=token, name=name, backend=backend, data_address=data_address, encrypted=not insecure)


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
        _print_json(to_json(outcome))
    _say_how_it_ended(outcome)


def _say_how_it_ended(outcome: "TrainOutcome") -> None:
    if outcome.interrupted:
        raise Interrupted(
            f"{outcome.steps} steps done; checkpoint: {outcome.checkpoint}; go on with: spantrain train --resume "
            f"{Path(outcome.checkpoint).parent.parent} --steps N"
        )


def _session(*, no_network: bool = False, listen: str | None = None, insecure: bool = False) -> "SessionOptions":
    from spantrain.app.session import SessionOptions

    return SessionOptions(listen=listen, network=not no_network, encrypted=not insecure)


def _check_dtype(dtype: str) -> None:
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype}: give float32 or bfloat16")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
