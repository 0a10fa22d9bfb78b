"""`spantrain testbed`: an emulated wide-area network on this machine."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.testbed.traffic import follow, load, traces
from spantrain.core.quantities import (
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_seconds,
)
from spantrain.errors import ConfigError, TestbedError

if TYPE_CHECKING:
    from rich.console import Console

    from spantrain.core.cluster import Cluster
    from spantrain.testbed.status import TestbedStatus

app = typer.Typer(
    name="testbed",
    help="Emulate a wide-area network on this machine: sites, hosts, and links with rate, delay, jitter and loss.",
    no_args_is_help=True,
)

_PLAIN_WIDTH = 120
Id = Annotated[str | None, typer.Option("--id", help="Which testbed, when several are running.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
SiteName = Annotated[str, typer.Argument(metavar="SITE")]


@app.command()
def up(
    preset: Annotated[str | None, typer.Option(help="A cluster by name, e.g. laptop.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster.yaml.")] = None,
    as_json: Json = False,
) -> None:
    """Build the network of a cluster and leave it running."""
    from spantrain.testbed.testbed import Testbed

    _show(Testbed.up(_load(preset, cluster), detached=True).status(), as_json)


@app.command(name="exec", context_settings={"allow_interspersed_args": False})
def run_on_host(
    host: Annotated[str, typer.Argument(metavar="HOST")],
    command: Annotated[list[str], typer.Argument(metavar="[--] COMMAND...")],
    testbed_id: Id = None,
) -> None:
    """Run a command on a host; ends with the command's exit code."""
    from spantrain.testbed.testbed import Testbed

    words = command[command[0] == "--" :]
    if not words:
        raise TestbedError(f"nothing to run on host {host}; give a command, e.g. `-- ip addr`")
    process = Testbed.attach(testbed_id).popen(host, words)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = process.wait()  # the command has had the same Ctrl-C
    raise typer.Exit(code if code >= 0 else 128 - code)


@app.command()
def shape(
    source: SiteName,
    target: SiteName,
    rate: Annotated[str | None, typer.Option(help="e.g. '50 Mbit/s'")] = None,
    delay: Annotated[str | None, typer.Option(help="One way, e.g. '20 ms'")] = None,
    jitter: Annotated[str | None, typer.Option(help="e.g. '2 ms': delays vary by plus or minus this")] = None,
    loss: Annotated[float | None, typer.Option(help="Part of the packets to lose, e.g. 0.01")] = None,
    both: Annotated[bool, typer.Option("--both", help="Both directions.")] = False,
    testbed_id: Id = None,
    as_json: Json = False,
) -> None:
    """Change the link from one site to another while it is in use; what is not given stays."""
    from spantrain.testbed.testbed import Testbed

    if rate is None and delay is None and jitter is None and loss is None:
        raise TestbedError("nothing to change: give --rate, --delay, --jitter or --loss")
    testbed = Testbed.attach(testbed_id)
    for start, end in [(source, target), (target, source)][: 1 + both]:
        testbed.shape(
            start,
            end,
            bandwidth_bytes_per_s=_parse("--rate", rate, parse_bandwidth),
            latency_s=_parse("--delay", delay, parse_seconds),
            jitter_s=_parse("--jitter", jitter, parse_seconds),
            loss_ratio=loss,
        )
    _show(testbed.status(), as_json)


@app.command(name="shape-site")
def shape_site(
    site: SiteName,
    uplink: Annotated[str | None, typer.Option(help="What all that leaves the site shares, e.g. '50 Mbit/s'")] = None,
    downlink: Annotated[str | None, typer.Option(help="What all that comes to the site shares")] = None,
    testbed_id: Id = None,
    as_json: Json = False,
) -> None:
    """Change the line that a site's links to all other sites share, while it is in use; what is not given stays."""
    from spantrain.testbed.testbed import Testbed

    if uplink is None and downlink is None:
        raise TestbedError("nothing to change: give --uplink or --downlink")
    testbed = Testbed.attach(testbed_id)
    testbed.shape_site(
        site,
        uplink_bandwidth_bytes_per_s=_parse("--uplink", uplink, parse_bandwidth),
        downlink_bandwidth_bytes_per_s=_parse("--downlink", downlink, parse_bandwidth),
    )
    _show(testbed.status(), as_json)


app.command()(traces)
app.command()(follow)
app.command()(load)


@app.command()
def status(testbed_id: Id = None, as_json: Json = False) -> None:
    """Show hosts, links, their present shape, and what they have carried."""
    from spantrain.testbed.testbed import Testbed

    _show(Testbed.attach(testbed_id).status(), as_json)


@app.command()
def down(testbed_id: Id = None, as_json: Json = False) -> None:
    """End this user's testbeds and what crashed ones left; not those that running programs use, unless named."""
    from spantrain.testbed.testbed import Testbed, down_all

    if testbed_id is None:
        ended = down_all()
    else:
        Testbed.attach(testbed_id).down()
        ended = (testbed_id,)
    if as_json:
        typer.echo(json.dumps({"down": ended}))
    else:
        typer.echo(f"down: {', '.join(ended)}" if ended else "no testbed was there")


def _load(preset: str | None, cluster: Path | None) -> "Cluster":
    if (preset is None) == (cluster is None):
        raise TestbedError("give either --preset NAME or --cluster FILE")
    if preset is not None:
        from spantrain.config.cluster.cluster_file import load_preset

        return load_preset(preset)
    from spantrain.config.cluster.cluster_file import load_cluster

    assert cluster is not None
    return load_cluster(cluster)


def _parse(option: str, text: str | None, parser: Callable[[str], float]) -> float | None:
    if text is None:
        return None
    try:
        return parser(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def _show(found: "TestbedStatus", as_json: bool) -> None:
    if as_json:
        fields = dataclasses.asdict(found) | {"router_cpu_share": found.router_cpu_share}
        typer.echo(json.dumps(fields))
        return
    from spantrain.cli.render.text import console_for_people

    console = console_for_people(_PLAIN_WIDTH)
    console.print(
        f"testbed {found.id} of cluster {found.cluster}, up {format_seconds(found.up_s)}, "
        f"router {found.router_cpu_share:.1%} of a processor"
    )
    _show_tables(console, found)


def _show_tables(console: "Console", found: "TestbedStatus") -> None:
    from rich.table import Column, Table

    hosts = Table("site", "host", "address", "interface")
    for host in found.hosts:
        hosts.add_row(host.site, host.host, host.address, host.interface)
    links = Table(Column("link", no_wrap=True), "rate", "delay", "jitter", "loss", "carried", "dropped", "lost")
    for link in found.links:
        links.add_row(
            f"{link.source} -> {link.target}",
            _rate(link.bandwidth_bytes_per_s, link.speed),
            format_seconds(link.latency_s),
            format_seconds(link.jitter_s) if link.jitter_s else "",
            f"{link.loss_ratio:.2%}" if link.loss_ratio else "",
            _carried(link.bytes_sent, link.load_bytes_sent),
            str(link.packets_dropped),
            str(link.packets_lost),
        )
    lines = Table(Column("line", no_wrap=True), "rate", "carried", "dropped")
    for line in found.lines:
        lines.add_row(
            f"{line.site} {line.way}",
            _rate(line.bandwidth_bytes_per_s, line.speed),
            _carried(line.bytes_sent, line.load_bytes_sent),
            str(line.packets_dropped),
        )
    console.print(hosts)
    console.print(links)
    if found.lines:
        console.print(lines)


def _rate(bandwidth_bytes_per_s: float, speed: float) -> str:
    present = format_bandwidth(bandwidth_bytes_per_s * speed)
    return present if speed == 1 else f"{present} ({speed:.0%})"


def _carried(all_bytes: int, load_bytes: int) -> str:
    return format_bytes(all_bytes) + (f" (load {format_bytes(load_bytes)})" if load_bytes else "")
