"""`spantrain outer`: clusters that train whole copies of one model and never wait for each other.

Options that the verbs of `spantrain outer` share.
"""

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from spantrain.cli.failure import clean_interrupt
from spantrain.cli.options import Json, Metrics, MetricsToken, print_json
from spantrain.config.files.json_codec import to_json
from spantrain.errors import ConfigError
from spantrain.outer.outer_file import load_outer

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
def up(config_path: Config, metrics: Metrics = None, metrics_token: MetricsToken = None, json_: Json = False) -> None:
    """Run master and shards on this machine, start again what ends; Ctrl-C ends all of it."""
    from spantrain.app.outer.up import keep_up
    from spantrain.cli.render.outer import say_up

    config = load_outer(config_path)
    if metrics is not None and metrics_token is None:
        raise ConfigError(
            "--metrics: give what Prometheus is to show in SPANTRAIN_METRICS_TOKEN: logs are read by many"
        )
    if metrics_token is not None:
        os.environ["SPANTRAIN_METRICS_TOKEN"] = metrics_token  # for master and shards, out of sight of others
    with clean_interrupt("master and shards"):
        keep_up(
            config, config_path, threading.Event(), ready=lambda found: say_up(found, config_path, as_json=json_),
            note=lambda text: typer.echo(text, err=True), metrics=metrics,
        )  # fmt: skip


@app.command()
def master(
    config_path: Config,
    metrics: Metrics = None,
    metrics_token: MetricsToken = None,
    end_with_input: EndWithInput = False,
) -> None:
    """Run the master: it decides, and holds no parameters."""
    config = load_outer(config_path)
    from spantrain.app.outer.serve import serve_master
    from spantrain.app.watching.serve import metrics_at
    from spantrain.cli.render.outer import say_master

    with clean_interrupt("the master"):
        serve_master(
            config, ready=say_master, end_with_input=end_with_input,
            metrics=lambda make: metrics_at(metrics, metrics_token, make, typer.echo),
        )  # fmt: skip


@app.command()
def shard(
    config_path: Config,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one of the file's shards.")],
    token: TokenText = None,
    token_file: TokenFile = None,
    metrics: Metrics = None,
    metrics_token: MetricsToken = None,
    end_with_input: EndWithInput = False,
) -> None:
    """Run one shard: it holds a run of the model's layers."""
    config = load_outer(config_path)
    place = config.shard(name)
    from spantrain.app.outer.join import master_address, master_token

    address, found = master_address(config), master_token(config, text=token, file=token_file)
    from spantrain.app.outer.serve import serve_shard
    from spantrain.app.watching.serve import metrics_at

    with clean_interrupt(f"shard {name}"):
        serve_shard(
            place, master=address, token=found, encrypted=config.for_master.encrypted,
            ready=lambda endpoint: typer.echo(f"shard {name} listens on {endpoint}"), end_with_input=end_with_input,
            metrics=lambda make: metrics_at(metrics, metrics_token, make, typer.echo),
        )  # fmt: skip


@app.command()
def status(
    where: Annotated[str, typer.Argument(metavar="CONFIG|ADDRESS", help="outer.yaml, or the master's HOST:PORT.")],
    token: TokenText = None,
    token_file: TokenFile = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, once a second, until Ctrl-C.")] = False,
    json_: Json = False,
) -> None:
    """Show clusters, versions, staleness, tokens, shards and what is under way."""
    from spantrain.app.outer.join import reach
    from spantrain.cli.render.outer import show_status, watch_status

    address, found = reach(where, token=token, file=token_file)
    from spantrain.outer.link.link import ask_status

    with clean_interrupt("watching"):
        if watch:
            watch_status(lambda: ask_status(address, found), as_json=json_)
        elif json_:
            print_json(ask_status(address, found).to_plain())
        else:
            show_status(ask_status(address, found))


@app.command()
def place(config_path: Config, json_: Json = False) -> None:
    """Say at which place the shards belong, by bandwidths and throughputs, and why."""
    from spantrain.app.outer.join import place_outer

    found = place_outer(load_outer(config_path))
    if json_:
        print_json(to_json(found))
        return
    from spantrain.cli.render.outer import show_placement

    show_placement(found)


@app.command()
def run(
    config_path: Config,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What trains this cluster.")],
    cluster: Annotated[str, typer.Option(help="This cluster's name, another than any other's.")],
    token: TokenText = None,
    token_file: TokenFile = None,
) -> None:
    """Become a cluster's training command, with what `OuterOptimizer` needs in its environment."""
    from spantrain.app.outer.join import become, master_address, master_token
    from spantrain.core.outer.stages import OuterCluster

    config = load_outer(config_path)
    told = OuterCluster(
        master=master_address(config),
        token=master_token(config, text=token, file=token_file),
        cluster=cluster,
        inner_steps=config.inner_steps,
        encrypted=config.for_master.encrypted,
    )
    become(command, told)
