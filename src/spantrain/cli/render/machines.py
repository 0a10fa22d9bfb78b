"""What `spantrain doctor` shows: a line for each check, what to do under it, and a count."""

from collections import Counter

from rich.console import Console
from rich.text import Text

from spantrain.app.machines.checks import CheckLine
from spantrain.app.machines.doctor import DoctorReport
from spantrain.cli.render.text import console_for_people, say

_PLAIN_WIDTH = 120
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_FEW_WAYS = 6
_IN_ONE = ("ports", "mtu", "clock")
"""Checks of which many good ways are one line; each rate is worth its own."""


def show_checks(report: DoctorReport) -> None:
    """Print a report for people."""
    console = console_for_people(_PLAIN_WIDTH)
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
            _show(console, CheckLine(check=line.check, where="all", verdict="ok", text=text), width)
    console.print(f"{report.ok} ok, {report.warn} warnings, {report.fail} failures", highlight=False)


def _show(console: Console, line: CheckLine, width: int) -> None:
    mark = Text(f"{line.verdict:4}", style=_STYLES[line.verdict])
    console.print(mark, Text(f" {line.check:11} {line.where:{width}}  {line.text}"), sep="", soft_wrap=True)
    if line.remedy:
        say(console, line.remedy, mark="   \N{RIGHTWARDS ARROW}")
