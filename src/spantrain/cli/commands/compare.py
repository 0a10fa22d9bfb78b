"""`spantrain compare`: the same training by every framework and every planner, on one emulated setting."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.failure import clean_interrupt
from spantrain.cli.options import (
    MAX_SAMPLES,
    ClusterFile,
    Data,
    Json,
    NetworkTraceName,
    NoNetwork,
    Out,
    Preset,
    SequenceLength,
    Tokenizer,
    check_speed,
    chosen_cluster,
    chosen_model,
    chosen_trace,
    print_json,
    session_options,
)
from spantrain.config.files.json_codec import render_json, to_json
from spantrain.config.files.text_files import check_can_make, write_atomically
from spantrain.core.job import LARGEST_NUMBER
from spantrain.core.quantities import parse_bandwidth
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from spantrain.app.comparison.compare import CompareRequest

Bandwidth = Annotated[
    str | None, typer.Option(help="Of all links between sites, or between the hosts of a single one.")
]
NetworkSpeed = Annotated[
    float | None,
    typer.Option(help="Part of all rates that links have, inside sites too; default: as --like has it, else 1."),
]
Like = Annotated[
    str,
    typer.Option(
        help="Scale links, batch and latencies until compute weighs beside traffic what it does for this model; auto: "
        "for what a small model of ours stands for; none: leave them."
    ),
]
SecondsPerMethod = Annotated[
    float, typer.Option(help="Of a round: fewer steps where they would take longer, one at least.", min=1.0)
]
DevicesPerSite = Annotated[
    int | None, typer.Option(help="Only so many of each site's devices; default: what this machine can do.", min=1)
]
EmulatedSpeed = Annotated[
    float | None,
    typer.Option(help="Fraction of their kinds' speed at which devices run; default: what this machine can do."),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(help="Samples a step; default: as --like has it, else by the devices.", min=1, max=MAX_SAMPLES),
]
Measured = Annotated[
    bool,
    typer.Option("--measured", help="Plan by a measured profile, not by the data sheets that the emulation follows."),
]

_MAX_SECONDS = 86_400.0
_JSON_FILE, _PICTURE_FILE = "compare.json", "compare.svg"


def compare(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="The model, e.g. gpt2-tiny.")],
    out: Out = Path("runs/compare"),
    preset: Preset = None,
    cluster: ClusterFile = None,
    methods: Annotated[
        str,
        typer.Option(help="all, frameworks, strategies, baselines, or names with commas; the first is compared with."),
    ] = "frameworks,auto,baselines",
    steps: Annotated[int, typer.Option(help="Of each run; the first two are not measured.", min=3, max=10**6)] = 8,
    rounds: Annotated[int, typer.Option(help="Each runs all methods once, in turn.", min=1, max=1000)] = 1,
    seconds_per_method: SecondsPerMethod = 15.0,
    global_batch: GlobalBatch = None,
    like: Like = "auto",
    bandwidth: Bandwidth = None,
    network_speed: NetworkSpeed = None,
    devices_per_site: DevicesPerSite = None,
    emulated_speed: EmulatedSpeed = None,
    measured: Measured = False,
    network_trace: NetworkTraceName = None,
    data: Data = None,
    tokenizer: Tokenizer = None,
    sequence_length: SequenceLength = None,
    seed: Annotated[int, typer.Option(help="Of weights and data order.", min=-LARGEST_NUMBER, max=LARGEST_NUMBER)] = 0,
    json_: Json = False,
    no_network: NoNetwork = False,
) -> None:
    """Train the same samples with torch's frameworks and with our plans, on the same emulated devices and network."""
    check_can_make(out, "--out", files=(_JSON_FILE, _PICTURE_FILE), folders=("logs",))
    request = _request(context)
    from spantrain.app.comparison.compare import compare as run_comparison
    from spantrain.app.comparison.methods import METHODS, MethodKind
    from spantrain.app.comparison.picture import draw_comparison
    from spantrain.cli.render.compare import CompareReporter, show_comparison

    options = session_options(no_network=no_network, model=request.model)
    with clean_interrupt("the comparison"), CompareReporter(tables=not json_) as reporter:
        outcome = run_comparison(request, options, reporter)
    document = to_json(outcome)
    own = frozenset(name for name, method in METHODS.items() if method.kind is MethodKind.PLAN)
    if json_:
        print_json(document)
    else:
        show_comparison(outcome)
    write_atomically(out / _JSON_FILE, render_json(document) + "\n")
    write_atomically(out / _PICTURE_FILE, draw_comparison(outcome, own))
    typer.echo(f"Wrote {out / _JSON_FILE} and {out / _PICTURE_FILE}", err=True)


def _request(context: typer.Context) -> "CompareRequest":
    given = context.params
    for option in ("network_speed", "emulated_speed"):
        if given[option] is not None:
            check_speed(f"--{option.replace('_', '-')}", given[option])
    if not given["seconds_per_method"] <= _MAX_SECONDS:
        raise ConfigError(f"--seconds-per-method {given['seconds_per_method']}: give at most {_MAX_SECONDS:g}")
    if abs(given["seed"]) >= 2**53:
        raise ConfigError(f"--seed {given['seed']}: give a whole number below 2^53")
    chosen = chosen_cluster(given["preset"], given["cluster"])
    spec = chosen_model(
        given["model"], data=given["data"], tokenizer=given["tokenizer"], sequence_length=given["sequence_length"]
    )
    from spantrain.app.comparison.compare import CompareRequest
    from spantrain.app.comparison.fit import SettingWishes
    from spantrain.app.comparison.methods import methods_named

    return CompareRequest(
        cluster=chosen,
        model=spec,
        methods=methods_named([name.strip() for name in given["methods"].split(",") if name.strip()]),
        out=given["out"],
        steps=given["steps"],
        rounds=given["rounds"],
        seconds_per_method=given["seconds_per_method"],
        wishes=SettingWishes(
            global_batch=given["global_batch"],
            devices_per_site=given["devices_per_site"],
            bandwidth_bytes_per_s=_bandwidth(given["bandwidth"]),
            network_speed=given["network_speed"],
            emulated_speed=given["emulated_speed"],
            like=given["like"],
        ),
        seed=given["seed"],
        network_trace=chosen_trace(given["network_trace"], emulated=not given["no_network"]),
        measured=given["measured"],
    )


def _bandwidth(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_bandwidth(text)
    except ValueError as error:
        raise ConfigError(f"--bandwidth: {error}") from None
