"""What changes while a plan runs: speeds of devices and links over time. See docs/network-traces.md."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spantrain.config.files.problems import Problems
from spantrain.config.files.text_files import read_text, write_atomically
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.core.quantities import parse_seconds
from spantrain.core.speed import SpeedTrace


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a file of changes says; times count from the first step's begin."""

    device_speed: Mapping[str, SpeedTrace] = field(default_factory=dict)
    """By device that leads a replica."""
    link_speed: Mapping[str, SpeedTrace] = field(default_factory=dict)
    """By link, e.g. `lab->office`, or by a site's line to all others, e.g. `lab up`."""


def read_changes(path: Path) -> Changes:
    """Read a file of changes.

    Raises:
        ConfigError: it is missing or wrong, or a list of changes runs backwards in time; all that is wrong is told.
    """
    problems = Problems(str(path))
    root = parse_yaml(read_text(path, remedy="write one, see docs/network-traces.md"), problems)
    tables = root.table(required=(), optional=("devices", "links"))
    devices, links = (tables[name].entries() if name in tables else {} for name in ("devices", "links"))
    device_steps = {name: _steps(entry) for name, entry in devices.items()}
    link_steps = {name: _steps(entry) for name, entry in links.items()}
    problems.check()
    return Changes(
        device_speed={name: SpeedTrace(changes=steps) for name, steps in device_steps.items()},
        link_speed={name: SpeedTrace(changes=steps) for name, steps in link_steps.items()},
    )


def write_changes(changes: Changes, path: Path) -> None:
    """Write a file that `read_changes` reads back.

    Raises:
        ConfigError: it cannot be written there.
    """
    write_atomically(path, changes_text(changes))


def changes_text(changes: Changes) -> str:
    """Return the text of a file of changes.

    >>> print(changes_text(Changes(link_speed={"lab->office": SpeedTrace(changes=((5.0, 0.0), (8.0, 1.0)))})), end="")
    links:
      "lab->office":
        - {at: 5.0 s, speed: 0.0}
        - {at: 8.0 s, speed: 1.0}
    """
    lines = []
    for table, speeds in (("devices", changes.device_speed), ("links", changes.link_speed)):
        lines += [f"{table}:"] if speeds else []
        for name, speed in speeds.items():
            lines.append(f'  "{name}":')
            lines += [f"    - {{at: {at_s!r} s, speed: {part!r}}}" for at_s, part in speed.changes]
    return "\n".join(lines or ["links: {}"]) + "\n"


def _steps(entry: Field) -> tuple[tuple[float, float], ...]:
    """Return the changes of one device or link, in their order."""
    found: list[tuple[float, float]] = []
    before_s = -math.inf
    for item in entry.items():
        row = item.table(required=("at", "speed"))
        at_s = _seconds(row["at"]) if "at" in row else math.nan
        if at_s <= before_s:
            item.problem(f"runs backwards in time: {at_s:g} s does not come after {before_s:g} s; sort the changes")
        speed = row["speed"].number() if "speed" in row else None
        if speed is not None and speed != 0 and speed < 1e-6:
            row["speed"].problem(f"must be zero, or a millionth or more, got {speed:g}; 1 is the normal speed")
        found.append((at_s, 1.0 if speed is None else speed))
        before_s = at_s
    if not found:
        entry.problem("needs at least one change, e.g. - {at: 10 s, speed: 0.5}")
    elif found[-1][1] <= 0:
        entry.problem("ends with speed 0, so that nothing would ever end; add a change with the speed that follows")
    return tuple(found)


def _seconds(entry: Field) -> float:
    return entry.quantity(parse_seconds, zero_allowed=True)
