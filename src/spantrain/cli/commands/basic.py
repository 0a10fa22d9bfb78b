"""The commands: parse, call the use case, show what came out. Nothing here imports torch until it is needed."""

import json
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from spantrain.cli import options as shared
from spantrain.cli.failure import clean_interrupt, told_interrupt
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import check_can_make, write_atomically
from spantrain.core.quantities import parse_bandwidth
from spantrain.core.records import LARGEST_NUMBER, Record
from spantrain.errors import ConfigError


def demo(
    out: shared.Out = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="Training steps.", min=10, max=LARGEST_NUMBER)] = 60,
    faults: Annotated[
        bool, typer.Option("--faults", help="Then train once more, with a device killed in mid-run and started again.")
    ] = False,
    json_: shared.Json = False,
    no_network: shared.NoNetwork = False,
) -> None:
    """Train a real model across three emulated places: measured, planned, predicted, compared."""
    from spantrain.app.demo import run_demo
    from spantrain.cli.render.render import TerminalReporter, show_demo_summary
    from spantrain.config.files.json_codec import render_json

    check_can_make(out, "--out", files=("summary.json", "profile.json", "plan.json"), folders=("logs", "single-site"))
    with clean_interrupt("the demonstration"), TerminalReporter(tables=not json_) as reporter:
        summary = run_demo(steps, shared.PlaceOptions(no_network=no_network).session(), out, reporter, faults=faults)
    document = to_json(summary)
    show_demo_summary(summary, stderr=json_)
    if json_:
        shared.print_json(document)
    write_atomically(out / "summary.json", render_json(document) + "\n")


class ProfileArguments(shared.ModelOptions, shared.PlaceOptions):
    """The options of `spantrain profile`."""

    model: Annotated[str, "The model, e.g. gpt2-tiny."]
    out: shared.Out
    max_samples: Annotated[int, typer.Option(help="Largest micro-batch that is measured.", min=1, max=1024)] = 16
    rounds: Annotated[int, typer.Option(help="Rounds of measuring the network.", min=1, max=100)] = 1
    fresh: Annotated[bool, "Measure compute again even if it is cached."] = False


@shared.with_options(ProfileArguments)
def profile(asked: ProfileArguments, context: typer.Context) -> None:
    """Measure the compute of every device and the network between all of them."""
    from spantrain.app.training.run_record import check_not_of_a_run

    out, as_json = asked.out, asked.json_
    cluster = asked.chosen_cluster()
    check_can_make(out, "--out", files=("profile.json",), folders=("logs",))
    check_not_of_a_run(out / "profile.json", "--out")
    model = asked.chosen_model(asked.model, read=asked.listen is None)
    from spantrain.app.profiling.profile import ProfileOptions, measure_profile
    from spantrain.app.session import open_session
    from spantrain.cli.render.render import TerminalReporter
    from spantrain.config.artefacts import write_profile
    from spantrain.models.build import unit_names

    options = ProfileOptions(
        dtype=asked.dtype, max_samples=asked.max_samples, network_rounds=asked.rounds, use_cache=not asked.fresh
    )
    where = asked.session(shared.launch_way(context), model=model)
    unit_names(model)  # a model that cannot be had or cut is refused before anything is written or started
    names = tuple(device.name for device in cluster.devices)
    with (
        clean_interrupt("profiling"),
        TerminalReporter(tables=not as_json) as reporter,
        open_session(cluster, names, where, out / "logs", reporter) as session,
    ):
        result = measure_profile(session, model, options, reporter)
    if as_json:
        figures = {
            "profile": str(out / "profile.json"),
            "devices": {entry.device: entry.score for entry in result.scores},
            "links": [to_json(link) for link in result.links],
            "compute_s": result.provenance.compute_s,
            "network_s": result.provenance.network_s,
        }
        shared.print_json(figures)
    else:
        reporter.show_profile(result)
    write_profile(result, out / "profile.json")
    if not as_json:
        reporter.note(f"Wrote {out / 'profile.json'}; next: spantrain groups {quote(str(out / 'profile.json'))}")


def groups(
    profile_path: Annotated[Path, typer.Argument(help="What `spantrain profile` wrote.")], json_: shared.Json = False
) -> None:
    """Print the devices grouped by network and, within, by compute and memory."""
    from spantrain.config.artefacts import read_profile
    from spantrain.planner.groups import MESSAGE_BYTES, group_devices, tree_lines

    found = read_profile(profile_path)
    grouped = group_devices(found)
    if json_:
        shared.print_json({"first_level": to_json(grouped), "message_bytes": MESSAGE_BYTES})
        return
    for line in tree_lines(grouped, found):
        typer.echo(line)


class WorkerArguments(Record):
    """The options of `spantrain worker`."""

    join: Annotated[str, typer.Option(envvar="SPANTRAIN_JOIN", help="The coordinator's HOST:PORT.")]
    or_join: Annotated[list[str] | None, "HOST:PORT where a coordinator may be started in its place; repeatable."] = (
        None
    )
    token_file: Annotated[
        Path | None, "A file with the token that the coordinator printed; default: it is in SPANTRAIN_TOKEN."
    ] = None
    name: Annotated[str | None, "This device's name in the cluster file."] = None
    backend: Annotated[str | None, "cpu, cuda:N, xpu:N or emulated; default: a GPU, if any."] = None
    data_address: Annotated[str | None, "Where the others reach this machine."] = None
    interface: Annotated[str | None, "The same by a network interface, e.g. wg0."] = None
    relay: shared.Relay = None
    model: Annotated[str | None, "FILE.py:FUNCTION of yours that makes the model, where runs may need it."] = None
    function: Annotated[
        list[str] | None, "FILE.py:FUNCTION of yours that runs may call for data or loss; repeatable."
    ] = None
    folder: Annotated[
        Path | None, "Where this device keeps its part of checkpoints; default: under the path of the coordinator's."
    ] = None
    keep: Annotated[
        float,
        typer.Option(help="How many seconds to keep what is held of a run for a lost coordinator.", min=0, max=86_400),
    ] = 600.0
    notice: Annotated[
        str | None, "A file, URL or command that says, by being there or ending with 0: leave the run."
    ] = None
    metrics: shared.Metrics = None
    metrics_token: shared.MetricsToken = None
    insecure: shared.Insecure = False


@shared.with_options(WorkerArguments)
def worker(asked: WorkerArguments, context: typer.Context) -> None:
    """Serve one device of this machine to a coordinator."""
    del context
    from spantrain.app.watching.metrics_text import worker_metrics
    from spantrain.app.watching.serve import metrics_at
    from spantrain.app.worker import WorkerReach, noticing, prepared_worker

    with clean_interrupt("the worker"):
        serving = prepared_worker(
            join=(asked.join, *(asked.or_join or ())),
            token_file=asked.token_file,
            name=asked.name,
            backend=asked.backend,
            reach=WorkerReach(
                data_address=asked.data_address,
                interface=asked.interface,
                relay=asked.relay,
                encrypted=not asked.insecure,
            ),
            functions=(*(asked.function or ()), *([asked.model] if asked.model else ())),
            keep_s=asked.keep,
            folder=asked.folder,
        )
        ends = told_interrupt(serving.stop, lambda: serving.leave("its machine ends it"))
        served = metrics_at(asked.metrics, asked.metrics_token, lambda: worker_metrics(serving), typer.echo)
        with ends, served, noticing(asked.notice, serving.leave):
            serving.run()


def relay(
    listen: Annotated[str, typer.Option(help="HOST:PORT to which workers and coordinators dial out.")],
    ports: Annotated[str, typer.Option(help="FIRST-LAST: the ports of this machine at which others reach them.")],
    token_file: Annotated[
        Path, typer.Option(help="Lines NAME TOKEN, for its owner alone; made, with one, where it is not there.")
    ],
    max_ports: Annotated[int, typer.Option(help="Of each token, at once.", min=1, max=65_535)] = 64,
    max_connections: Annotated[int, typer.Option(help="Of each token, at once.", min=1, max=65_535)] = 512,
    rate: Annotated[
        str | None, typer.Option(help="What each token may send and receive together, e.g. '1 Gbit/s'; default: all.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Forward connections to workers and coordinators that can only dial out; it copies bytes, and can read nothing."""
    from spantrain.app.relay import serve_relay
    from spantrain.transport.control.address import Address
    from spantrain.transport.relay.server import RelayLimits, RelayNews

    most = RelayLimits(
        ports=max_ports, connections=max_connections, bytes_per_s=shared.positive("--rate", rate, parse_bandwidth)
    )

    def ready(at: Address) -> None:
        news = {"event": "ready", "listen": str(at), "ports": ports, "token_file": str(token_file)}
        text = f"Relay at {at}: forwards ports {ports} to those that dial out to it; tokens: {token_file}"
        typer.echo(json.dumps(news) if json_ else text)

    def told(news: RelayNews) -> None:
        typer.echo(json.dumps(to_json(news)) if json_ else str(news))

    with clean_interrupt("the relay"):
        serve_relay(listen, ports, token_file, most, ready=ready, told=told)


def drain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that is under way.")],
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Which is to leave it.")],
) -> None:
    """Have a device leave a run that is under way, behind a step, with what it holds handed over; no step is lost."""
    from spantrain.app.live_requests import ask_to_drain

    ask_to_drain(run, device)
    typer.echo(f"{device} is asked to leave behind one of the next steps; the run tells when it has")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, with a checkpoint.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write; new or empty.")],
    dtype: Annotated[
        str, typer.Option(help="Of the weights that are written: float32, bfloat16, float16.")
    ] = "float32",
    merge: Annotated[bool, typer.Option("--merge", help="Add adapters of peft to the weights they adapt.")] = False,
    function: shared.Functions = None,
    json_: shared.Json = False,
) -> None:
    """Write the weights of a run's newest checkpoint to a folder that the transformers library, or peft, loads."""
    check_can_make(to, "--to")
    from spantrain.app.weights import export_run

    outcome = export_run(run, to, functions=shared.chosen_functions(function), dtype=dtype, merge=merge)
    if json_:
        shared.print_json(to_json(outcome))
        return
    typer.echo(f"{outcome.model} after {outcome.steps} steps: {outcome.parameters} parameters in {outcome.folder}")
    compare = f"; python examples/load_exported.py {outcome.folder}, in the sources, compares outputs"
    typer.echo(f"Load it with {outcome.loads_with}{'' if outcome.loads_with == 'peft' else compare}")
    if outcome.untrained:
        typer.echo(f"Not trained, since the model does not use them: {', '.join(outcome.untrained)}")


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Weights as *.safetensors, with the model's names.")],
    model: Annotated[str, typer.Option(help="The model, e.g. gpt2-tiny, hf:FOLDER or FILE.py:FUNCTION.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of a new run.")],
    data: shared.Data = None,
    tokenizer: shared.Tokenizer = None,
    sequence_length: shared.SequenceLength = None,
    json_: shared.Json = False,
) -> None:
    """Make a checkpoint at step 0 of weights; go on with: spantrain train --resume RUN --plan PLAN."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name one with *.safetensors")
    check_can_make(out, "--out")
    spec = shared.ModelOptions(data=data, tokenizer=tokenizer, sequence_length=sequence_length).chosen_model(model)
    from spantrain.app.weights import import_weights

    outcome = import_weights(folder, spec, out)
    if json_:
        shared.print_json(to_json(outcome))
        return
    typer.echo(f"{outcome.model}: {outcome.parameters} parameters in {outcome.checkpoint}")
    if outcome.ignored:
        shown = ", ".join(outcome.ignored[:5]) + (", ..." if len(outcome.ignored) > 5 else "")
        typer.echo(f"Not used: {shown}")
    typer.echo(f"Go on with: spantrain train --resume {quote(str(outcome.run))} --plan PLAN --steps N")
