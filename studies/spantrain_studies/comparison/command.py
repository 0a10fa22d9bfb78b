"""`spantrain compare`: the same training by every framework and every planner, on one setting."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.failure import clean_interrupt
from spantrain.cli.options import (
    MAX_SAMPLES,
    ClusterFile,
    Data,
    Json,
    ModelOptions,
    NetworkTraceName,
    NoNetwork,
    Out,
    PlaceOptions,
    Preset,
    SequenceLength,
    Tokenizer,
    check_speed,
    chosen_cluster,
    chosen_trace,
    print_json,
    quantity,
    with_options,
)
from spantrain.config.files.json_codec import render_json, to_json
from spantrain.config.files.text_files import check_can_make, write_atomically
from spantrain.core.quantities import parse_bandwidth
from spantrain.core.records import LARGEST_NUMBER
from spantrain.errors import ConfigError, SpanTrainError

if TYPE_CHECKING:
    from spantrain_studies.comparison.compare import CompareRequest
    from spantrain_studies.comparison.figures import CompareOutcome

_MAX_SECONDS = 86_400.0
_JSON_FILE, _PICTURE_FILE = "compare.json", "compare.svg"


@dataclass(frozen=True, kw_only=True)
class CompareArguments:
    """The options of `spantrain compare`."""

    model: Annotated[str, "The model, e.g. gpt2-tiny."]
    out: Out = Path("runs/compare")
    preset: Preset = None
    cluster: ClusterFile = None
    methods: Annotated[
        str, "all, frameworks, strategies, baselines, or names with commas; the first is compared with."
    ] = "frameworks,auto,baselines"
    steps: Annotated[int, typer.Option(help="Of each run; the first two are not measured.", min=3, max=10**6)] = 8
    rounds: Annotated[int, typer.Option(help="Each runs all methods once, in turn.", min=1, max=1000)] = 1
    seconds_per_method: Annotated[
        float, typer.Option(help="Of a round: fewer steps where they would take longer, one at least.", min=1.0)
    ] = 15.0
    global_batch: Annotated[
        int | None,
        typer.Option(help="Samples a step; default: as --like has it, else by the devices.", min=1, max=MAX_SAMPLES),
    ] = None
    like: Annotated[
        str,
        "Scale links, batch and latencies until compute weighs beside traffic what it does for this model; "
        "auto: for what a small model of ours stands for; none: leave them.",
    ] = "auto"
    bandwidth: Annotated[str | None, "Of all links between sites, or between the hosts of a single one."] = None
    network_speed: Annotated[
        float | None, "Part of all rates that links have, inside sites too; default: as --like has it, else 1."
    ] = None
    devices_per_site: Annotated[
        int | None, typer.Option(help="Only so many of each site's devices; default: what this machine can do.", min=1)
    ] = None
    emulated_speed: Annotated[
        float | None, "Fraction of their kinds' speed at which emulated devices run; default: what this machine can do."
    ] = None
    measured: Annotated[
        bool, "Plan by a measured profile, not by the data sheets that the emulation follows; real devices always."
    ] = False
    network_trace: NetworkTraceName = None
    data: Data = None
    tokenizer: Tokenizer = None
    sequence_length: SequenceLength = None
    chat_template: Annotated[
        str | None, "Of conversations: a Jinja file, chatml or plain; default: the tokenizer's own."
    ] = None
    train_on: Annotated[str | None, "Of conversations: learn `answers` (the default) or `all`."] = None
    packing: Annotated[bool, "Several conversations in a sample, kept apart."] = False
    seed: Annotated[int, typer.Option(help="Of weights and data order.", min=-LARGEST_NUMBER, max=LARGEST_NUMBER)] = 0
    json_: Json = False
    no_network: NoNetwork = False

    def request(self) -> "CompareRequest":
        """Return what is to be compared.

        Raises:
            ConfigError: a value makes no sense, or there is no such cluster, model, method or trace.
        """
        for option, speed in (("--network-speed", self.network_speed), ("--emulated-speed", self.emulated_speed)):
            if speed is not None:
                check_speed(option, speed)
        if not self.seconds_per_method <= _MAX_SECONDS:
            raise ConfigError(f"--seconds-per-method {self.seconds_per_method}: give at most {_MAX_SECONDS:g}")
        if abs(self.seed) >= 2**53:
            raise ConfigError(f"--seed {self.seed}: give a whole number below 2^53")
        cluster = chosen_cluster(self.preset, self.cluster)
        data = ModelOptions(
            data=self.data,
            tokenizer=self.tokenizer,
            sequence_length=self.sequence_length,
            chat_template=self.chat_template,
            train_on=self.train_on,
            packing=self.packing,
            dropout="off",  # others draw otherwise
        )
        spec = data.chosen_model(self.model)
        rate = None if self.bandwidth is None else quantity("--bandwidth", self.bandwidth, parse_bandwidth)
        from spantrain_studies.comparison.compare import CompareRequest
        from spantrain_studies.comparison.fit import SettingOverrides
        from spantrain_studies.comparison.methods import methods_named

        return CompareRequest(
            cluster=cluster,
            model=spec,
            methods=methods_named([name.strip() for name in self.methods.split(",") if name.strip()]),
            out=self.out,
            steps=self.steps,
            rounds=self.rounds,
            seconds_per_method=self.seconds_per_method,
            overrides=SettingOverrides(
                global_batch=self.global_batch,
                devices_per_site=self.devices_per_site,
                bandwidth_bytes_per_s=rate,
                network_speed=self.network_speed,
                emulated_speed=self.emulated_speed,
                like=self.like,
            ),
            seed=self.seed,
            network_trace=chosen_trace(self.network_trace, emulated=not self.no_network),
            measured=self.measured,
        )


@with_options(CompareArguments)
def compare(asked: CompareArguments, _: typer.Context) -> None:
    """Train the same samples with torch's frameworks and with our plans, on the same devices, emulated or real."""
    out = asked.out
    check_can_make(out, "--out", files=(_JSON_FILE, _PICTURE_FILE), folders=("logs",))
    request = asked.request()
    from spantrain_studies.comparison.compare import compare as run_comparison
    from spantrain_studies.comparison.methods import METHODS, MethodKind
    from spantrain_studies.comparison.picture import draw_comparison
    from spantrain_studies.comparison.show import CompareReporter, show_comparison

    def tell(outcome: "CompareOutcome") -> None:
        document = to_json(outcome)
        own = frozenset(name for name, method in METHODS.items() if method.kind is MethodKind.PLAN)
        if asked.json_:
            print_json(document)
        else:
            show_comparison(outcome)
        write_atomically(out / _JSON_FILE, render_json(document) + "\n")
        write_atomically(out / _PICTURE_FILE, draw_comparison(outcome, own))
        typer.echo(f"Wrote {out / _JSON_FILE} and {out / _PICTURE_FILE}", err=True)

    options = PlaceOptions(no_network=asked.no_network).session(model=request.model)
    try:
        with clean_interrupt("the comparison"), CompareReporter(tables=not asked.json_) as reporter:
            outcome = run_comparison(request, options, reporter)
    except SpanTrainError:
        if reporter.part is not None:
            tell(reporter.part)
        raise
    tell(outcome)
