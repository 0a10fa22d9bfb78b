"""`spantrain init` and `spantrain doctor`: machines as they are, before anything runs on them."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from spantrain.cli import options as shared
from spantrain.cli.failure import clean_interrupt
from spantrain.cli.render.text import console_for_people, say
from spantrain.config.cluster_file import load_cluster, parse_cluster
from spantrain.config.cluster_text import cluster_text
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import check_can_write, write_atomically
from spantrain.core.names import check_name, is_name
from spantrain.core.records import Record
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from spantrain.app.machines.checks import CheckLine
    from spantrain.reach.machines import Machine

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_FEW_WAYS = 6
_IN_ONE = ("ports", "mtu", "clock")
"""Checks of which many good ways are one line; each rate is worth its own."""


class MachineOptions(Record):
    """Which machines; this one where none of these is given."""

    ssh: Annotated[str | None, "Machines that `ssh NAME` reaches without a question: lab1,user@lab2."] = None
    inventory: Annotated[Path | None, "A YAML list of such machines, with name, site, python (docs/cluster.md)."] = None
    slurm: Annotated[bool, "The nodes of the Slurm job that this runs in."] = False
    kubernetes: Annotated[
        str | None, typer.Option(metavar="NAMESPACE", help="The pods that run in a namespace, by kubectl.")
    ] = None
    selector: Annotated[str | None, "Of pods, as kubectl takes it, e.g. app=spantrain."] = None
    ssh_config: Annotated[Path | None, "Of ssh, instead of ~/.ssh/config."] = None
    python: Annotated[str, "The interpreter there, e.g. that of an environment with SpanTrain."] = "python3"

    @property
    def ssh_words(self) -> tuple[str, ...]:
        """What ssh is told beside the machine."""
        return ("-F", str(self.ssh_config)) if self.ssh_config else ()

    @property
    def given(self) -> list[str]:
        """The ways that are named; two make no sense."""
        ways = ("ssh", "inventory", "slurm", "kubernetes")
        found = [f"--{name}" for name in ways if getattr(self, name) not in (None, False)]
        if len(found) > 1:
            raise ConfigError(f"give one of {' and '.join(found)}")
        return found

    def machines(self) -> "tuple[Machine, ...]":
        """Return the machines that the options name.

        Raises:
            ConfigError: two ways are named.
            UsageError: what is named makes no sense, or cannot be asked.
        """
        from spantrain.reach import allocations
        from spantrain.reach.machines import this_machine
        from spantrain.runtime.launch.environment import Environment

        python, words = self.python, self.ssh_words
        match self.given:
            case ["--ssh"]:
                return allocations.named_machines((self.ssh or "").split(","), "ssh", python=python, options=words)
            case ["--inventory"]:
                return allocations.inventory_machines(self.inventory or Path(), python=python, options=words)
            case ["--slurm"]:
                return allocations.slurm_machines(Environment.read(os.environ).slurm_nodes, python=python)
            case ["--kubernetes"]:
                return allocations.kubernetes_machines(self.kubernetes or "", self.selector, python=python)
            case _:
                return (this_machine(allocations.own_name()),)


class InitArguments(MachineOptions):
    """The options of `spantrain init`."""

    out: Annotated[Path, "The cluster file to write."] = Path("cluster.yaml")
    name: Annotated[str, "Of the cluster."] = "cluster"
    site: Annotated[list[str] | None, "NAME=MACHINE,MACHINE: who stands together; default: by round trips."] = None
    torchrun: Annotated[bool, "Under torchrun: every process tells of its machine, rank 0 writes."] = False
    no_measure: Annotated[bool, "Try nothing between machines; rates and unknown kinds are assumed."] = False
    overwrite: Annotated[bool, "Replace the file if it is there."] = False
    json_: shared.Json = False


@shared.with_options(InitArguments)
def init(asked: InitArguments, _: typer.Context) -> None:
    """Write a cluster file from what machines are: this one, or those of SSH, Slurm, Kubernetes or torchrun."""
    from spantrain.app.machines.describe import found_cluster, gathered_cluster
    from spantrain.cli.render.render import TerminalReporter

    try:
        check_name("--name", asked.name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_can_write(asked.out, "--out")
    if asked.out.exists() and not asked.overwrite:
        raise ConfigError(f"--out {asked.out}: is there already; name another, or give --overwrite")
    with clean_interrupt("init"), TerminalReporter(tables=not asked.json_) as reporter:
        if asked.torchrun:
            if asked.given:
                raise ConfigError(f"give either --torchrun or {asked.given[0]}")
            outcome = gathered_cluster(name=asked.name, reporter=reporter)
            if outcome is None:
                return
        else:
            machines = _placed(asked.machines(), asked.site or [])
            outcome = found_cluster(machines, name=asked.name, measure=not asked.no_measure, reporter=reporter)
        text = cluster_text(outcome.cluster, notes=outcome.notes)
        parse_cluster(text, source=str(asked.out))
        write_atomically(asked.out, text)
        if asked.json_:
            shared.print_json(
                {"file": str(asked.out), "notes": list(outcome.notes), "cluster": to_json(outcome.cluster)}
            )
            return
        typer.echo(text, nl=False)
        reporter.note(f"Wrote {asked.out}; next: spantrain doctor --cluster {quote(str(asked.out))}")


def _placed(machines: "Sequence[Machine]", sites: Sequence[str]) -> "tuple[Machine, ...]":
    """Return machines with the sites that options give them.

    Raises:
        ConfigError: an option is not written so, or names no machine.
    """
    found = {machine.name: machine for machine in machines}
    by_target = {machine.target: machine.name for machine in machines if machine.target}
    for text in sites:
        site, _, names = text.partition("=")
        if not is_name(site) or not names:
            raise ConfigError(f"--site {text}: write NAME=MACHINE,MACHINE, e.g. lab=lab1,lab2")
        for name in names.split(","):
            known = by_target.get(name, name)
            if known not in found:
                raise ConfigError(f"--site {text}: no machine {name!r}; there are {', '.join(found)}")
            found[known] = replace(found[known], site=site)
    return tuple(found.values())


class DoctorArguments(MachineOptions):
    """The options of `spantrain doctor`."""

    cluster: Annotated[Path | None, "Check the hosts of a cluster file, by ssh at their addresses."] = None
    data: Annotated[list[str] | None, "A file or folder that should be the same everywhere; repeatable."] = None
    listen: Annotated[str | None, "HOST:PORT that a command here is going to --listen on; check that it can."] = None
    quick: Annotated[bool, "Without loading torch and without measuring rates and encryption."] = False
    json_: shared.Json = False


@shared.with_options(DoctorArguments)
def doctor(asked: DoctorArguments, context: typer.Context) -> None:
    """Check machines and what goes between them, each line with a remedy; exit 1 where something would fail."""
    from spantrain.app.machines.checks import line_of
    from spantrain.app.machines.doctor import DoctorOptions, examine
    from spantrain.cli.render.render import TerminalReporter
    from spantrain.reach.allocations import host_machines
    from spantrain.transport.control.address import Address

    cluster = load_cluster(asked.cluster) if asked.cluster else None
    listen = Address.parse(asked.listen, "--listen") if asked.listen else None
    if listen and (listen.path or not listen.port):
        raise ConfigError(f"--listen {asked.listen}: give HOST:PORT, where other machines are going to join")
    options = DoctorOptions(cluster=cluster, paths=tuple(asked.data or ()), listen=listen, quick=asked.quick)
    real = []
    if cluster and not asked.given:  # where all are emulated, this machine
        own = cluster.device_by_name
        real = [host for host in cluster.hosts if any(not own[name].emulated for name in host.devices)]
    python = asked.python if "python" in shared.given_options(context) else None
    machines = host_machines(real, python=python, options=asked.ssh_words) if real else asked.machines()
    with clean_interrupt("doctor"), TerminalReporter(tables=not asked.json_) as reporter:
        report = examine(machines, options, reporter)
    if asked.json_:
        shared.print_json(to_json(report))
    else:
        console = console_for_people()
        good = Counter(line.check for line in report.lines if line.verdict == "ok" and "->" in line.where)
        told: set[str] = set()
        width = max((len(line.where) for line in report.lines), default=0)
        for line in report.lines:
            many = good[line.check] > _FEW_WAYS and line.check in _IN_ONE
            if line.verdict != "ok" or "->" not in line.where or not many:
                _show(console, line, width)
            elif line.check not in told:
                told.add(line.check)
                text = f"{good[line.check]} ways, e.g. {line.where}: {line.text}"
                _show(console, line_of(line.check, "all", text), width)
        console.print(f"{report.ok} ok, {report.warn} warnings, {report.fail} failures", highlight=False)
    if report.fail:
        raise typer.Exit(1)


def _show(console: Console, line: "CheckLine", width: int) -> None:
    """Print a line for a check, and what to do under it."""
    mark = Text(f"{line.verdict:4}", style=_STYLES[line.verdict])
    console.print(mark, Text(f" {line.check:11} {line.where:{width}}  {line.text}"), sep="", soft_wrap=True)
    if line.remedy:
        say(console, line.remedy, mark="   \N{RIGHTWARDS ARROW}")
