"""`spantrain testbed kill`, `pause`, `restart`, `partition`, `heal`: faults on purpose, now and by name."""

from pathlib import Path
from typing import Annotated

import typer

from spantrain.cli.commands.testbed import Id, Json, app, attached
from spantrain.cli.failure import clean_interrupt
from spantrain.cli.options import positive, print_json
from spantrain.core.quantities import parse_seconds
from spantrain.errors import ConfigError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run whose workers this machine has started.")]
DeviceName = Annotated[str, typer.Argument(metavar="DEVICE", help="Whose worker is meant.")]
Site = Annotated[str | None, typer.Argument(metavar="[SITE]")]


@app.command()
def kill(run: Run, device: DeviceName, as_json: Json = False) -> None:
    """Kill a device's worker in a run that is under way (SIGKILL)."""
    _make(run, device, "kill", "its worker was killed", as_json=as_json)


@app.command()
def pause(
    run: Run,
    device: DeviceName,
    seconds: Annotated[str, typer.Option("--for", help="How long, e.g. 500ms; then it goes on by itself.")] = "3 s",
    as_json: Json = False,
) -> None:
    """Have a device's worker stand still for some time (SIGSTOP, then SIGCONT)."""
    _make(run, device, "pause", f"its worker stands still for {seconds}", as_json=as_json, seconds=seconds)


@app.command()
def restart(run: Run, device: DeviceName, as_json: Json = False) -> None:
    """Start the worker of a device again that has none; it joins by itself."""
    _make(run, device, "restart", "its worker was started", as_json=as_json)


@app.command()
def partition(
    site: Annotated[str, typer.Argument(metavar="SITE")],
    other: Annotated[str | None, typer.Argument(metavar="[SITE]", help="Left out: all others.")] = None,
    testbed_id: Id = None,
    as_json: Json = False,
) -> None:
    """Let nothing pass between two sites, or one site and all others, until `heal`; a run's own control stays."""
    _cut(site, other, testbed_id, is_cut=True, as_json=as_json)


@app.command()
def heal(site: Site = None, other: Site = None, testbed_id: Id = None, as_json: Json = False) -> None:
    """Let all pass again between two sites, one site and all others, or (none named) all sites."""
    _cut(site, other, testbed_id, is_cut=False, as_json=as_json)


def _make(run: Path, device: str, what: str, done: str, *, as_json: bool, seconds: str = "3 s") -> None:
    from spantrain.app.faults import LONGEST_PAUSE_S, Fault, FaultKind, ask_for_fault

    for_s = positive("--for", seconds, parse_seconds)
    assert for_s is not None
    if for_s > LONGEST_PAUSE_S:
        raise ConfigError(f"--for {seconds}: give {LONGEST_PAUSE_S:g} s at most")
    with clean_interrupt(f"{what} {device}"):
        ask_for_fault(run, Fault(after_step=0, what=FaultKind(what), device=device, seconds=for_s))
    if as_json:
        print_json({"run": str(run), "device": device, "fault": what} | ({"seconds": for_s} if what == "pause" else {}))
    else:
        typer.echo(f"{device}: {done}")


def _cut(site: str | None, other: str | None, testbed_id: str | None, *, is_cut: bool, as_json: bool) -> None:
    sites = tuple(name for name in (site, other) if name is not None)
    ways = attached(testbed_id).cut(*sites, is_cut=is_cut)
    if as_json:
        print_json({"cut" if is_cut else "healed": [list(way) for way in ways]})
        return
    if not ways:
        typer.echo("nothing was cut there")
        return
    now = "nothing passes until `spantrain testbed heal`" if is_cut else "all passes again"
    typer.echo(f"{', '.join(f'{source} -> {target}' for source, target in ways)}: {now}")
