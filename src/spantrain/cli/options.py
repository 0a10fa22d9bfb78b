"""Options that several commands share, each written once."""

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from spantrain.config.cluster_file import PRESET_NAMES, load_cluster, load_preset
from spantrain.config.prices import read_prices, with_prices
from spantrain.config.traces.network_traces import NetworkTrace, network_trace
from spantrain.core.cluster import Cluster
from spantrain.core.quantities import parse_seconds
from spantrain.core.records import Record
from spantrain.core.update.optimizers import OPTIMIZERS, optimizer_problems, optimizer_state
from spantrain.errors import ConfigError
from spantrain.formats.precision import DTYPES

MAX_SAMPLES = 2**24
"""Samples of an optimizer step, at most."""
PAGE_LISTEN = "127.0.0.1:0"
"""Where pages are served: at any free port, for this machine alone."""
_MIN_PATIENCE_S = 2.0

if TYPE_CHECKING:
    from spantrain.app.launch.way import LaunchWay
    from spantrain.app.session import SessionOptions
    from spantrain.core.profile import Profile
    from spantrain.core.units import ModelSpec

Preset = Annotated[str | None, typer.Option("--preset", help=f"A ready cluster: {', '.join(PRESET_NAMES)}.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="A cluster file (docs/cluster.md).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output; the rest to stderr.")]
PricesFile = Annotated[Path | None, "A file of prices in the place of the shipped ones (docs/prices.md)."]
NoNetwork = Annotated[
    bool, typer.Option("--no-network", help="Do not emulate links: all workers on loopback, unshaped.")
]
NetworkTraceName = Annotated[
    str | None,
    "How links between sites change from the first step on: a name (`spantrain testbed traces`) or FILE.yaml.",
]
Relay = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of a `spantrain relay` by which others reach this machine; its token: SPANTRAIN_RELAY_TOKEN."
    ),
]
Metrics = Annotated[
    str | None, typer.Option("--metrics", help="HOST:PORT at which to serve metrics for Prometheus (docs/page.md).")
]
MetricsToken = Annotated[
    str | None,
    typer.Option(envvar="SPANTRAIN_METRICS_TOKEN", help="What Prometheus shows; default: a new one, which is printed."),
]
Optimizer = Annotated[str, f"{', '.join(OPTIMIZERS)}: it decides the memory for its state."]
Insecure = Annotated[bool, "Do not encrypt the data between workers."]
Data = Annotated[
    str | None,
    typer.Option(
        help="Your own: a text file or folder, rows of text or of conversations (.jsonl, .json, .parquet), a folder of "
        "a `datasets` set, images:FOLDER, FILE.py:FUNCTION (docs/data.md)."
    ),
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A tokenizer.json, or the folder of one; default: the model reads bytes.")
]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens of a sample; default: the model's.")]
Functions = Annotated[
    list[str] | None,
    typer.Option(
        "--function",
        help="FILE.py:FUNCTION of yours that may be called where the plan or checkpoint names it; repeatable.",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder to write to; made when missing.")]


T = TypeVar("T")
N = TypeVar("N", bound=float)


def with_options(kind: type[T]) -> Callable[[Callable[[T, typer.Context], None]], Callable[..., None]]:
    """Return a decorator: a command whose options are the fields of a dataclass, which it is given with its context.

    Typer makes options of parameters, so the command is shown to it with one parameter for each field; those that it
    shares with other commands come behind its own. A field that is annotated with its help alone is the option of its
    name; one that is false by default is a switch, which has no opposite.
    """
    hints = get_type_hints(kind, include_extras=True)
    ordered = sorted(fields(kind), key=lambda one: one.name not in kind.__annotations__)  # type: ignore[arg-type]
    shown = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for one in ordered:
        default = Parameter.empty if one.default is MISSING else one.default
        shown.append(
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=_declared(hints[one.name], one))
        )

    def decorate(run: Callable[[T, typer.Context], None]) -> Callable[..., None]:
        def command(context: typer.Context, **values: object) -> None:
            run(kind(**values), context)

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__annotations__ = {one.name: one.annotation for one in shown}
        setattr(command, "__signature__", Signature(shown))  # noqa: B010 - no attribute that a type checker knows
        return command

    return decorate


def _declared(hint: Any, one: "Field[Any]") -> Any:
    """Return a field's type as typer takes it."""
    kind, *said = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not said or not isinstance(said[0], str):
        return hint
    switch = [f"--{one.name.replace('_', '-')}"] if one.default is False else []
    return Annotated[kind, typer.Option(*switch, help=said[0])]


def given_options(context: typer.Context) -> dict[str, str]:
    """Return the options that stand on the command line: the word of each, by the name of its parameter."""
    named = {str(one.name): one.opts[0] for one in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in named}
    return {name: named[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def words_of(asked: object, given: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Return some of the options that stand on the command line as words, as they were given."""
    words: list[str] = []
    for name in (name for name in given if name in names):
        value = getattr(asked, name)
        for one in value if isinstance(value, list) else [value]:
            words += [given[name]] if one is True else [given[name], str(one)]
    return words


def launch_way(context: typer.Context) -> "LaunchWay | None":
    """Return what starts the workers of a command that stands behind `spantrain launch`."""
    found: LaunchWay | None = context.find_root().obj
    return found


def check_speed(option: str, speed: float) -> None:
    """Refuse a part of a speed that is no number, or out of all proportion."""
    if not 1e-6 <= speed <= 1e6:
        raise ConfigError(f"{option} {speed:g}: give a part of the speed between 1e-6 and 1e6, e.g. 0.1")


def chosen_cluster(preset: str | None, cluster_file: Path | None) -> Cluster:
    """Return the cluster that exactly one of the two options names."""
    if preset is not None and cluster_file is None:
        return load_preset(preset)
    if cluster_file is not None and preset is None:
        return load_cluster(cluster_file)
    raise ConfigError("give either --preset NAME or --cluster FILE")


def priced(profile: "Profile", prices: Path | None) -> "Profile":
    """Return a profile whose cluster has the prices of a file, if one is given, wherever it has none of its own.

    Raises:
        ConfigError: the file is missing or wrong, or lacks the price of a kind that is there.
    """
    if prices is None:
        return profile
    return replace(profile, cluster=with_prices(profile.cluster, read_prices(prices).table))


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that is none."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: give {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")


class PlaceOptions(Record):
    """Which machines work, and how workers are there and reach each other."""

    preset: Preset = None
    cluster: ClusterFile = None
    dtype: Annotated[str, f"{', '.join(DTYPES)}; 16 bits by autocast, with the last weights, too."] = "float32"
    emulated_speed: Annotated[
        float | None, "Fraction of their kind's speed at which emulated devices run; default: the cluster's."
    ] = None
    json_: Json = False
    no_network: NoNetwork = False
    listen: Annotated[
        str | None, "HOST:PORT on which to wait for workers of other machines, instead of starting them here."
    ] = None
    relay: Relay = None
    insecure: Insecure = False

    def chosen_cluster(self) -> Cluster:
        """Return the cluster that is asked for, at the speed that is; the dtype must be one that there is."""
        check_dtype(self.dtype)
        cluster = chosen_cluster(self.preset, self.cluster)
        if self.emulated_speed is None:
            return cluster
        if not cluster.emulated:
            raise ConfigError(f"--emulated-speed: no device of {cluster.name} is emulated; leave it out")
        check_speed("--emulated-speed", self.emulated_speed)
        return replace(cluster, emulated_speed=self.emulated_speed)

    def session(
        self, launch: "LaunchWay | None" = None, *, lost_after: str | None = None, model: "ModelSpec | None" = None
    ) -> "SessionOptions":
        """Return where workers run; those of this machine may call the functions that a model names.

        Raises:
            ConfigError: `lost_after` is no time, or too short.
        """
        from spantrain.app.relay import relay_access
        from spantrain.app.session import SessionOptions
        from spantrain.models.data.choice import data_paths, user_functions

        patience_s = None if lost_after is None else quantity("--lost-after", lost_after, parse_seconds)
        if patience_s is not None and patience_s < _MIN_PATIENCE_S:
            raise ConfigError(
                f"--lost-after {lost_after}: give at least {_MIN_PATIENCE_S:g} s; workers tell 3 times a second"
            )
        return SessionOptions(
            listen=self.listen,
            relay=relay_access(self.relay, encrypted=not self.insecure),
            launch=launch,
            network=not self.no_network,
            encrypted=not self.insecure,
            functions=user_functions(model) if model else (),
            data=data_paths(model) if model else (),
            heartbeat_timeout_s=patience_s,
        )


class ModelOptions(Record):
    """What is asked of a model beside its name: its data, and what is changed of it."""

    data: Data = None
    tokenizer: Tokenizer = None
    sequence_length: SequenceLength = None
    lora: Annotated[str | None, "Train adapters in an hf: model alone: r=8,alpha=16,targets=q_proj+v_proj."] = None
    dropout: Annotated[str | None, "on: as the module has it; off: it trains in evaluation mode. Default: on."] = None
    compile: Annotated[bool, "Layers are compiled by torch.compile: a while to begin, then faster."] = False
    chat_template: Annotated[
        str | None, "Of conversations: a Jinja file, chatml or plain; default: the tokenizer's own."
    ] = None
    train_on: Annotated[str | None, "Of conversations: learn `answers` (the default) or `all`."] = None
    packing: Annotated[bool, "Several conversations in a sample, kept apart."] = False

    def chosen_model(self, name: str, *, read: bool = True) -> "ModelSpec":
        """Return the model of that name, on the data that is asked for; which is read, to see that it can be.

        Not if `read` is false: it is read later, or is on other machines.

        Raises:
            ConfigError: there is no such model, data or tokenizer, or they do not fit each other.
        """
        from spantrain.core.units import ChatForm
        from spantrain.models.data.choice import model_on_data, without_dropout

        asked = {"template": self.chat_template, "train_on": self.train_on, "packing": self.packing or None}
        asked = {name: value for name, value in asked.items() if value is not None}
        try:
            chat = ChatForm(**asked) if asked else None  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"--train-on: {error}") from None
        spec = model_on_data(
            name, data=self.data, tokenizer=self.tokenizer, sequence_length=self.sequence_length, chat=chat
        )
        if self.lora is not None:
            from spantrain.models.adapters import LoraForm, with_lora

            spec = with_lora(spec, LoraForm.parse(self.lora))
        if self.dropout not in (None, "on", "off"):
            raise ConfigError(f"--dropout {self.dropout}: give on or off")
        if self.dropout == "off":
            spec = without_dropout(spec)
        if self.compile:
            spec = replace(spec, compiled=True)
        if read and (self.data is not None or self.tokenizer is not None):
            from spantrain.models.data.dataset import open_dataset

            open_dataset(spec)
        return spec


def chosen_functions(functions: Sequence[str] | None) -> tuple[str, ...]:
    """Return the users' functions that may be called, whose files must be there.

    Raises:
        ConfigError: one is not written as FILE.py:FUNCTION, or there is no such file.
    """
    from spantrain.models.data.choice import named_function

    return tuple(named_function(function, "--function") for function in functions or ())


def chosen_trace(text: str | None, *, emulated: bool) -> NetworkTrace | None:
    """Return the trace that links are to follow, if one was asked for.

    Raises:
        ConfigError: there is no such trace, or the links are not emulated.
    """
    if text is None:
        return None
    if not emulated:
        raise ConfigError(
            f"--network-trace {text}: only emulated links can be made to change; leave out --no-network and --listen"
        )
    return network_trace(text)


def quantity(option: str, text: str, parse: Callable[[str], N]) -> N:
    """Return the quantity that an option gives, as one of `core.quantities` reads it.

    Raises:
        ConfigError: it is none.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def positive(option: str, text: str | None, parse: Callable[[str], N]) -> N | None:
    """Return the quantity that an option gives, if it is given; it must be more than nothing.

    Raises:
        ConfigError: it is none, or 0.
    """
    found = None if text is None else quantity(option, text, parse)
    if found == 0:
        raise ConfigError(f"{option} {text}: must be more than nothing")
    return found


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def planned_state(optimizer: str) -> str:
    """Return an optimizer by the state that it keeps: SGD is run with momentum.

    Raises:
        ConfigError: there is none of that name.
    """
    if problems := list(optimizer_problems(optimizer, {})):
        raise ConfigError(f"--optimizer: {problems[0]}")
    return optimizer_state(optimizer, momentum=1.0, options={})
