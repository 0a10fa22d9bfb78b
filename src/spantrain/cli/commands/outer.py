"""`spantrain outer`: clusters that train whole copies of one model and never wait for each other."""

import json
import os
import threading
import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spantrain.cli import options as shared
from spantrain.cli.failure import clean_interrupt
from spantrain.cli.render.text import console_for_people, say
from spantrain.config.files.json_codec import to_json
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds
from spantrain.errors import ConfigError, PeerLostError
from spantrain.outer.outer_file import load_outer

if TYPE_CHECKING:
    from spantrain.app.outer.up import OuterUp
    from spantrain.outer.link.status import MasterStatus

_WATCH_EVERY_S = 1.0
_FEW_TRANSFERS = 8

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A file as docs/outer.md shows, e.g. outer.yaml.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="A file with the master's token; default: in its state folder.")
]
TokenText = Annotated[str | None, typer.Option("--token", envvar="SPANTRAIN_OUTER_TOKEN", help="The master's token.")]
EndWithInput = Annotated[bool, typer.Option("--end-with-input", hidden=True, help="End when standard input ends.")]


app = typer.Typer(
    name="outer",
    help="Train across clusters that never wait for each other: a master, shards that hold the parameters, and any "
    "training loop with an `OuterOptimizer` (docs/outer.md). Begin with `spantrain outer demo`.",
    no_args_is_help=True,
)


@app.command()
def up(
    config_path: Config,
    relay: shared.Relay = None,
    metrics: shared.Metrics = None,
    metrics_token: shared.MetricsToken = None,
    json_: shared.Json = False,
) -> None:
    """Run master and shards on this machine, start again what ends; Ctrl-C ends all of it."""
    from spantrain.app.outer.up import keep_up
    from spantrain.app.relay import outer_relay

    config = load_outer(config_path)
    outer_relay(relay, config, config.master, *config.shards)  # or say now what is wrong
    if metrics is not None and metrics_token is None:
        raise ConfigError(
            "--metrics: give what Prometheus is to show in SPANTRAIN_METRICS_TOKEN: logs are read by many"
        )
    if metrics_token is not None:
        os.environ["SPANTRAIN_METRICS_TOKEN"] = metrics_token  # for master and shards, out of sight of others
    with clean_interrupt("master and shards"):
        keep_up(
            config, config_path, threading.Event(), ready=lambda found: _say_up(found, config_path, as_json=json_),
            note=lambda text: typer.echo(text, err=True), metrics=metrics, relay=relay,
        )  # fmt: skip


@app.command()
def master(
    config_path: Config,
    relay: shared.Relay = None,
    metrics: shared.Metrics = None,
    metrics_token: shared.MetricsToken = None,
    end_with_input: EndWithInput = False,
) -> None:
    """Run the master: it decides, and holds no parameters."""
    config = load_outer(config_path)
    from spantrain.app.outer.serve import serve_master
    from spantrain.app.relay import outer_relay
    from spantrain.app.watching.serve import metrics_at

    with clean_interrupt("the master"):
        serve_master(
            config, end_with_input=end_with_input,
            ready=lambda at, file: typer.echo(f"master: {at}\ntoken: in {file}"),  # not itself: logs are read by many
            relay=outer_relay(relay, config, config.master),
            metrics=lambda make: metrics_at(metrics, metrics_token, make, typer.echo),
        )  # fmt: skip


@app.command()
def shard(
    config_path: Config,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one of the file's shards.")],
    token: TokenText = None,
    token_file: TokenFile = None,
    relay: shared.Relay = None,
    metrics: shared.Metrics = None,
    metrics_token: shared.MetricsToken = None,
    end_with_input: EndWithInput = False,
) -> None:
    """Run one shard: it holds a run of the model's layers."""
    config = load_outer(config_path)
    place = config.shard(name)
    from spantrain.app.outer.join import master_address, master_token

    address, found = master_address(config), master_token(config, text=token, file=token_file)
    from spantrain.app.outer.serve import serve_shard
    from spantrain.app.relay import outer_relay
    from spantrain.app.watching.serve import metrics_at

    with clean_interrupt(f"shard {name}"):
        serve_shard(
            config, place, master=address, token=found, relay=outer_relay(relay, config, place),
            ready=lambda endpoint: typer.echo(f"shard {name} listens on {endpoint}"), end_with_input=end_with_input,
            metrics=lambda make: metrics_at(metrics, metrics_token, make, typer.echo),
        )  # fmt: skip


@app.command()
def status(
    where: Annotated[str, typer.Argument(metavar="CONFIG|ADDRESS", help="outer.yaml, or the master's HOST:PORT.")],
    token: TokenText = None,
    token_file: TokenFile = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, once a second, until Ctrl-C.")] = False,
    json_: shared.Json = False,
) -> None:
    """Show clusters, versions, staleness, tokens, shards and what is under way."""
    from spantrain.app.outer.join import reach

    address, found = reach(where, token=token, file=token_file)
    from rich.live import Live

    from spantrain.outer.link.link import ask_status

    with clean_interrupt("watching"):
        while watch and json_:
            typer.echo(json.dumps(to_json(ask_status(address, found), wire=True)))
            time.sleep(_WATCH_EVERY_S)
        if json_:
            shared.print_json(to_json(ask_status(address, found), wire=True))
            return
        console, first = console_for_people(), _status(ask_status(address, found))
        if not watch:
            console.print(first)
            return
        with Live(first, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_EVERY_S)
                try:
                    live.update(_status(ask_status(address, found)), refresh=True)
                except PeerLostError as error:  # a master that is away is waited for
                    live.update(Text(str(error)), refresh=True)


@app.command()
def place(config_path: Config, json_: shared.Json = False) -> None:
    """Say at which place the shards belong, by bandwidths and throughputs, and why."""
    from spantrain.app.outer.join import place_outer

    found = place_outer(load_outer(config_path))
    if json_:
        shared.print_json(to_json(found))
        return
    console = console_for_people()
    shards = Table("shard", "place")
    for shard, place in found.places.items():
        shards.add_row(shard, place)
    console.print(shards)
    say(console, found.reason)
    clusters = list(found.exchange_s)
    table = Table("all at", "an exchange", *clusters, "bandwidth × throughput", "memory", title="Each place by itself")
    for score in found.single:
        table.add_row(
            score.place,
            format_seconds(score.weighted_s),
            *(format_seconds(score.exchange_s[cluster]) for cluster in clusters),
            f"{score.paper_score:.3g}",
            "fits" if score.fits else "too little",
        )
    console.print(table)
    say(console, "an exchange: a push and a pull, mean over clusters by throughput; then each cluster's own. Bandwidth "
                 "× throughput is the Di-PS paper's figure: one fast link can win by it")  # fmt: skip


@app.command()
def run(
    config_path: Config,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What trains this cluster.")],
    cluster: Annotated[str, typer.Option(help="This cluster's name, another than any other's.")],
    token: TokenText = None,
    token_file: TokenFile = None,
) -> None:
    """Become a cluster's training command, with what `OuterOptimizer` needs in its environment."""
    from spantrain.app.outer.join import become, check_cluster, master_address, master_token
    from spantrain.core.outer.stages import OuterCluster

    config = load_outer(config_path)
    check_cluster(config, cluster)
    told = OuterCluster(
        master=master_address(config),
        token=master_token(config, text=token, file=token_file),
        cluster=cluster,
        inner_steps=config.inner_steps,
        encrypted=config.for_master.encrypted,
    )
    become(command, told)


def _say_up(found: "OuterUp", config_path: Path, *, as_json: bool) -> None:
    """Print how to join what is up."""
    if as_json:
        shared.print_json({name: str(value) for name, value in vars(found).items()})
    else:
        typer.echo(
            f"master: {found.address}\n"
            f"token: {found.token} (also in {found.token_file})\n"
            f"logs: {found.logs}\n"
            "in each cluster, with the token in SPANTRAIN_OUTER_TOKEN where that file is not at hand:\n"
            f"  spantrain outer run {quote(str(config_path))} --cluster NAME -- COMMAND...\n"
            f"  spantrain outer status {quote(str(config_path))}"
        )


def _status(status: "MasterStatus") -> RenderableType:
    versions = ", ".join(str(one.version) for one in status.fragments) or str(status.version)
    summary = (
        f"{status.address}: version{'s' if status.fragments else ''} {versions}, {status.updates} updates, "
        f"{status.left_out} pushes left out, {status.layers} layers of {format_bytes(status.size_bytes)}"
    )
    if status.chunks is not None:
        summary += f"; data: {status.chunks.counted_samples:,} of {status.chunks.samples:,} samples counted"
    parts: list[RenderableType] = [Text(summary)]
    if status.late_s is not None:
        parts.append(Text(f"no new version for {format_seconds(status.late_s)}: waits for {status.waits_for}"))
    parts += [_clusters(status), _shards(status)]
    if status.links:
        links = Table("cluster", "shard", "way", "layers", "bytes", "rate of late")
        for one in status.links:
            sizes = (str(one.layers), format_bytes(one.size_bytes), format_bandwidth(one.bytes_per_s))
            links.add_row(one.cluster, one.shard, one.way, *sizes)
        parts.append(links)
    lines = [
        f"{one.cluster} {one.way}es layer {one.layer}, {format_bytes(one.size_bytes)}, at {one.shard} since "
        f"{format_seconds(one.since_s)}"
        for one in status.transfers[:_FEW_TRANSFERS]
    ]
    if len(status.transfers) > _FEW_TRANSFERS:
        lines.append(f"and {len(status.transfers) - _FEW_TRANSFERS} more layers on their way")
    for number, update in enumerate([one.last_update for one in status.fragments] or [status.last_update]):
        if update is not None:
            of = f" of fragment {number}" if status.fragments else ""
            lines.append(f"last update{of}: norm {update.norm:.4g}, scaled by {update.scale:.3g}")
            lines += [f"  {cluster}: {verdict}" for cluster, verdict in update.verdicts.items()]
    lines += [f"refused {count} times: {reason}" for reason, count in status.refusals.items()]
    return Group(*parts, *(Text(line) for line in lines))


def _clusters(status: "MasterStatus") -> Table:
    table = Table("cluster", "state", "version", "got", "staleness", "pushes", "left out", "tokens", "chunks", "heard")
    for one in status.clusters:
        table.add_row(
            one.name,
            one.state,
            str(one.version),
            "" if one.got_version is None else f"{one.got_version}, {_ago(one.got_ago_s)}",
            f"{one.mean_staleness:.1f}",
            str(one.pushes),
            str(one.left_out),
            f"{one.tokens:,}",
            str(one.leases),
            _ago(one.heard_ago_s),
        )
    return table


def _shards(status: "MasterStatus") -> Table:
    table = Table("shard", "state", "listens on", "layers", "holds", "versions", "heard")
    for one in status.shards:
        table.add_row(
            one.name,
            one.state,
            one.endpoint,
            str(one.layers),
            format_bytes(one.size_bytes),
            ", ".join(map(str, one.versions)),
            _ago(one.heard_ago_s),
        )
    return table


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f"{format_seconds(seconds)} ago"
