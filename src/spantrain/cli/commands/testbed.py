"""`spantrain testbed`: an emulated wide-area network on this machine, links that change, and competing traffic."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.failure import clean_interrupt
from spantrain.cli.options import chosen_cluster, positive, quantity
from spantrain.config.traces.library import EXAMPLES, named_trace
from spantrain.config.traces.network_traces import network_trace
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds, parse_bandwidth, parse_seconds
from spantrain.errors import Interrupted, TestbedError

if TYPE_CHECKING:
    from spantrain.core.speed import SpeedTrace
    from spantrain.testbed.control import TestbedStatus
    from spantrain.testbed.load import Load
    from spantrain.testbed.testbed import Testbed

app = typer.Typer(
    name="testbed",
    help="Emulate a wide-area network on this machine: sites, hosts, and links with rate, delay, jitter and loss.",
    no_args_is_help=True,
)

Id = Annotated[str | None, typer.Option("--id", help="Which testbed, when several are running.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
SiteName = Annotated[str, typer.Argument(metavar="SITE")]
_BARS = "▁▂▃▄▅▆▇█"
_BARS_SHOWN = 40
_LIST_RUN_S = 120.0
"""How long the run is that the list shows."""
_PROGRESS_S = 1.0
_LOOK_S = 0.1
"""So soon it is noticed that a load has ended by itself."""


@app.command()
def up(
    preset: Annotated[str | None, typer.Option(help="A cluster by name, e.g. laptop.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster.yaml.")] = None,
    as_json: Json = False,
) -> None:
    """Build the network of a cluster and leave it running."""
    from spantrain.testbed.testbed import Testbed

    _show(Testbed.up(chosen_cluster(preset, cluster), detached=True).status(), as_json)


def attached(testbed_id: str | None) -> "Testbed":
    """Return the testbed that is running, or the one of several that is named."""
    from spantrain.testbed.testbed import Testbed

    return Testbed.attach(testbed_id)


@app.command(name="exec", context_settings={"allow_interspersed_args": False})
def run_on_host(
    host: Annotated[str, typer.Argument(metavar="HOST")],
    command: Annotated[list[str], typer.Argument(metavar="[--] COMMAND...")],
    testbed_id: Id = None,
) -> None:
    """Run a command on a host; ends with the command's exit code."""
    words = command[command[0] == "--" :]
    if not words:
        raise TestbedError(f"nothing to run on host {host}; give a command, e.g. `-- ip addr`")
    process = attached(testbed_id).popen(host, words)
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
    if rate is None and delay is None and jitter is None and loss is None:
        raise TestbedError("nothing to change: give --rate, --delay, --jitter or --loss")
    testbed = attached(testbed_id)
    for start, end in [(source, target), (target, source)][: 1 + both]:
        testbed.shape(
            start,
            end,
            bandwidth_bytes_per_s=None if rate is None else quantity("--rate", rate, parse_bandwidth),
            latency_s=None if delay is None else quantity("--delay", delay, parse_seconds),
            jitter_s=None if jitter is None else quantity("--jitter", jitter, parse_seconds),
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
    if uplink is None and downlink is None:
        raise TestbedError("nothing to change: give --uplink or --downlink")
    testbed = attached(testbed_id)
    testbed.shape_site(
        site,
        uplink_bandwidth_bytes_per_s=None if uplink is None else quantity("--uplink", uplink, parse_bandwidth),
        downlink_bandwidth_bytes_per_s=None if downlink is None else quantity("--downlink", downlink, parse_bandwidth),
    )
    _show(testbed.status(), as_json)


@app.command()
def traces(as_json: Json = False) -> None:
    """List the networks that change, for --network-trace and `follow`."""
    known = [(name, named_trace(name)) for name in EXAMPLES]
    if as_json:
        rows: list[dict[str, object]] = [
            {
                "name": name,
                "says": trace.shape.says,
                "parameters": dict(trace.shape.times) | dict(trace.shape.numbers),
                "speed_of_120_s": trace.speed(_LIST_RUN_S, "lab->office").changes,
            }
            for name, trace in known
        ]
        typer.echo(json.dumps({"traces": rows}))
        return
    width = max(map(len, EXAMPLES))
    for name, trace in known:
        shape = trace.shape
        parameters = {**shape.times, **{key: f"{value:g}" for key, value in shape.numbers.items()}}
        parameters.pop(shape.number_is, "")
        shown = ",".join(f"{key}={value}" for key, value in parameters.items())
        typer.echo(f"{name:{width}}  {sparkline(trace.speed(_LIST_RUN_S, 'lab->office'), _LIST_RUN_S)}")
        typer.echo(f"{'':{width}}  {shape.says.replace('NN', str(name.rpartition('-')[2]))}; {name}:{shown}")
    typer.echo(
        f"The bars show a run of {_LIST_RUN_S:g} s, at full height the links' normal speed. Times are seconds (10s) or "
        "parts of\nthe run (25%); links=lab->office+office->lab picks links. Any number goes in drop-NN and outage-NN."
    )


@app.command()
def follow(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A name (`spantrain testbed traces`) or a .yaml file.")],
    run: Annotated[str, typer.Option("--run", help="How long the run is that its times are parts of.")] = "60 s",
    testbed_id: Id = None,
    as_json: Json = False,
) -> None:
    """Let the links of a running testbed follow a trace from now on, instead of any before."""
    run_s = positive("--run", run, parse_seconds)
    assert run_s is not None
    testbed = attached(testbed_id)
    wanted = network_trace(trace)
    speeds = wanted.on_links(testbed.links, run_s)
    testbed.follow(speeds)
    if as_json:
        typer.echo(json.dumps({"run_s": run_s, "links": {name: speed.changes for name, speed in speeds.items()}}))
        return
    width = max(map(len, speeds))
    for name, speed in speeds.items():
        typer.echo(f"{name:{width}}  {sparkline(speed, run_s)}")
    typer.echo(f"{len(speeds)} links follow {trace} from now on, shown over {format_seconds(run_s)}")


@app.command()
def load(
    source: Annotated[str, typer.Option("--from", help="Site or host that sends.")],
    target: Annotated[str, typer.Option("--to", help="Site or host that receives.")],
    rate: Annotated[str | None, typer.Option(help="e.g. 60Mbit/s; default: as fast as it goes.")] = None,
    seconds: Annotated[str | None, typer.Option("--for", help="e.g. 30s; default: until Ctrl-C.")] = None,
    connections: Annotated[int, typer.Option(help="TCP connections; links share by connection.", min=1, max=64)] = 1,
    testbed_id: Id = None,
    as_json: Json = False,
) -> None:
    """Send competing traffic between two places of a running testbed; the router counts it apart."""
    from spantrain.testbed.load import Load

    bytes_per_s = positive("--rate", rate, parse_bandwidth)
    duration_s = positive("--for", seconds, parse_seconds) or math.inf
    testbed = attached(testbed_id)
    sender, receiver = testbed.hosts_of(source)[0], testbed.hosts_of(target)[-1]
    if sender == receiver:
        raise TestbedError(f"--from {source} --to {target}: both are host {sender}; name two places")
    stopped = False
    with Load(testbed, sender, receiver, bytes_per_s=bytes_per_s, connections=connections) as traffic:
        try:
            with clean_interrupt("the load"):
                _watch(traffic, duration_s, f"{sender} -> {receiver}")
        except Interrupted:
            stopped = True
        elapsed_s = traffic.elapsed_s
        received = traffic.stop()
    mean_bytes_per_s = received / elapsed_s
    if as_json:
        fields = {
            "source": sender,
            "target": receiver,
            "asked_bytes_per_s": bytes_per_s,
            "received_bytes": received,
            "elapsed_s": elapsed_s,
            "mean_bytes_per_s": mean_bytes_per_s,
        }
        typer.echo(json.dumps(fields))
    else:
        asked = "" if bytes_per_s is None else f" of {format_bandwidth(bytes_per_s)} asked for"
        carried = (
            f"{format_bytes(received)} in {format_seconds(elapsed_s)}, {format_bandwidth(mean_bytes_per_s)}{asked}"
        )
        typer.echo(f"{sender} -> {receiver}: {carried}")
    if stopped and seconds is not None:
        raise Interrupted(f"the load was stopped after {format_seconds(elapsed_s)} of {seconds}; nothing is left")


@app.command()
def status(testbed_id: Id = None, as_json: Json = False) -> None:
    """Show hosts, links, their present shape, and what they have carried."""
    _show(attached(testbed_id).status(), as_json)


@app.command()
def down(testbed_id: Id = None, as_json: Json = False) -> None:
    """End this user's testbeds and what crashed ones left; not those that running programs use, unless named."""
    from spantrain.testbed.testbed import down_all

    if testbed_id is None:
        ended = down_all()
    else:
        attached(testbed_id).down()
        ended = (testbed_id,)
    if as_json:
        typer.echo(json.dumps({"down": ended}))
    else:
        typer.echo(f"down: {', '.join(ended)}" if ended else "no testbed was there")


def _show(found: "TestbedStatus", as_json: bool) -> None:
    if as_json:
        fields = dataclasses.asdict(found) | {"router_cpu_share": found.router_cpu_share}
        typer.echo(json.dumps(fields))
        return
    from rich.table import Column, Table

    from spantrain.cli.render.text import console_for_people

    console = console_for_people()
    console.print(
        f"testbed {found.id} of cluster {found.cluster}, up {format_seconds(found.up_s)}, "
        f"router {found.router_cpu_share:.1%} of a processor"
    )
    hosts = Table("site", "host", "address", "interface")
    for host in found.hosts:
        hosts.add_row(host.site, host.host, host.address, host.interface)
    links = Table(Column("link", no_wrap=True), "rate", "delay", "jitter", "loss", "carried", "dropped", "lost")
    for link in found.links:
        links.add_row(
            f"{link.source} -> {link.target}",
            "cut" if link.is_cut else _rate(link.bandwidth_bytes_per_s, link.speed),
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


def sparkline(speed: "SpeedTrace", run_s: float, bars: int = _BARS_SHOWN) -> str:
    """Return a line of bars, each as high as the mean speed over its part of the run; a space where nothing passes.

    >>> from spantrain.core.speed import SpeedTrace
    >>> sparkline(SpeedTrace(changes=((2.0, 0.5), (6.0, 0.0), (7.0, 1.0))), 8.0, 8)
    '██▄▄▄▄ █'
    """
    width_s = run_s / bars
    means = (speed.work_s(number * width_s, (number + 1) * width_s) / width_s for number in range(bars))
    return "".join(" " if mean <= 0 else _BARS[min(len(_BARS), max(1, round(mean * len(_BARS)))) - 1] for mean in means)


def _watch(traffic: "Load", duration_s: float, way: str) -> None:
    """Say how much arrives, until the time is over."""
    shown_s, shown_bytes = 0.0, 0
    while traffic.elapsed_s < duration_s:
        if not traffic.running:
            raise TestbedError(f"the load {way} ended by itself; is the testbed still there?")
        total = traffic.received_bytes(wait_s=min(_LOOK_S, max(0.0, duration_s - traffic.elapsed_s)))
        now_s = traffic.elapsed_s
        if now_s - shown_s < _PROGRESS_S:
            continue
        rate = format_bandwidth((total - shown_bytes) / (now_s - shown_s))
        sys.stderr.write(f"{way}  {now_s:6.1f} s  {rate}, {format_bytes(total)} in all\n")
        shown_s, shown_bytes = now_s, total
