"""`spantrain testbed traces`, `follow` and `load`: networks that change, and competing traffic."""

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.failure import clean_interrupt
from spantrain.config.traces.library import EXAMPLES, named_trace
from spantrain.config.traces.network_traces import network_trace
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds, parse_bandwidth, parse_seconds
from spantrain.errors import ConfigError, Interrupted, TestbedError

if TYPE_CHECKING:
    from spantrain.core.speed import SpeedTrace
    from spantrain.testbed.load import Load

Id = Annotated[str | None, typer.Option("--id", help="Which testbed, when several are running.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

_BARS = "▁▂▃▄▅▆▇█"
_BARS_SHOWN = 40
_LIST_RUN_S = 120.0
"""How long the run is that the list shows."""
_PROGRESS_S = 1.0
_LOOK_S = 0.1
"""So soon it is noticed that a load has ended by itself."""


def sparkline(speed: "SpeedTrace", run_s: float, bars: int = _BARS_SHOWN) -> str:
    """Return a line of bars, each as high as the mean speed over its part of the run; a space where nothing passes.

    >>> from spantrain.core.speed import SpeedTrace
    >>> sparkline(SpeedTrace(changes=((2.0, 0.5), (6.0, 0.0), (7.0, 1.0))), 8.0, 8)
    '██▄▄▄▄ █'
    """
    width_s = run_s / bars
    means = (speed.work_s(number * width_s, (number + 1) * width_s) / width_s for number in range(bars))
    return "".join(" " if mean <= 0 else _BARS[min(len(_BARS), max(1, round(mean * len(_BARS)))) - 1] for mean in means)


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


def follow(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A name (`spantrain testbed traces`) or a .yaml file.")],
    run: Annotated[str, typer.Option("--run", help="How long the run is that its times are parts of.")] = "60 s",
    testbed_id: Id = None,
    as_json: Json = False,
) -> None:
    """Let the links of a running testbed follow a trace from now on, in the place of any before."""
    from spantrain.testbed.testbed import Testbed

    run_s = _quantity("--run", run)
    testbed = Testbed.attach(testbed_id)
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
    from spantrain.testbed.testbed import Testbed

    bytes_per_s = None if rate is None else _rate("--rate", rate)
    duration_s = math.inf if seconds is None else _quantity("--for", seconds)
    testbed = Testbed.attach(testbed_id)
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
    _show(sender, receiver, received, elapsed_s, bytes_per_s, as_json)
    if stopped and seconds is not None:
        raise Interrupted(f"the load was stopped after {format_seconds(elapsed_s)} of {seconds}; nothing is left")


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


def _show(
    sender: str, receiver: str, received: int, elapsed_s: float, asked_bytes_per_s: float | None, as_json: bool
) -> None:
    mean_bytes_per_s = received / elapsed_s
    if as_json:
        fields = {
            "source": sender,
            "target": receiver,
            "asked_bytes_per_s": asked_bytes_per_s,
            "received_bytes": received,
            "elapsed_s": elapsed_s,
            "mean_bytes_per_s": mean_bytes_per_s,
        }
        typer.echo(json.dumps(fields))
        return
    asked = "" if asked_bytes_per_s is None else f" of {format_bandwidth(asked_bytes_per_s)} asked for"
    typer.echo(
        f"{sender} -> {receiver}: {format_bytes(received)} in {format_seconds(elapsed_s)}, "
        f"{format_bandwidth(mean_bytes_per_s)}{asked}"
    )


def _quantity(option: str, text: str) -> float:
    try:
        found = parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not found:
        raise ConfigError(f"{option} {text}: must be more than nothing")
    return found


def _rate(option: str, text: str) -> float:
    try:
        found = parse_bandwidth(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not found:
        raise ConfigError(f"{option} {text}: must be more than nothing")
    return found
