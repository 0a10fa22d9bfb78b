"""How links change over a run, by name or from a file of changes (docs/network-traces.md)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from spantrain.config.files.problems import Problems, did_you_mean
from spantrain.config.files.text_files import read_text, write_atomically
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.config.traces.library import NamedTrace, named_trace
from spantrain.core.cluster import Cluster
from spantrain.core.quantities import parse_seconds
from spantrain.core.records import Record
from spantrain.core.speed import SpeedTrace
from spantrain.errors import ConfigError


class Changes(Record):
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
        at_s = row["at"].quantity(parse_seconds, zero_allowed=True) if "at" in row else math.nan
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


_SUFFIXES = (".yaml", ".yml")


class NetworkTrace(Record):
    """A trace that was asked for, not yet tied to a run or a cluster."""

    text: str
    """As it was asked for."""
    named: NamedTrace | None = None
    """A trace of the library; None: it is out of a file."""
    from_file: Mapping[str, SpeedTrace] | None = None

    def on(self, cluster: Cluster, run_s: float) -> dict[str, SpeedTrace]:
        """Return how fast each link of a cluster is, over a run that should take so many seconds.

        Raises:
            ConfigError: as `on_links`.
        """
        return self.on_links(tuple(network_links(cluster)), run_s)

    def on_links(self, known: Sequence[str], run_s: float) -> dict[str, SpeedTrace]:
        """Return how fast each link is, over a run that should take so many seconds.

        Links are the ways between sites (`lab->office`) and the lines that a site has to all others (`lab up`,
        `lab down`). A named trace changes all of them in the same way, so that what passes several of them feels it
        once; `random-walk` changes the ways only, each by itself.

        Raises:
            ConfigError: there is no link at all, or none of a name that is given; times run backwards.
        """
        if not known:
            raise ConfigError(
                f"network trace {self.text}: there is one site only, so no link between sites can change; leave the "
                "trace out, or choose a cluster of several sites"
            )
        if self.from_file is not None:
            self._check_known(tuple(self.from_file), known)
            return dict(self.from_file)
        assert self.named is not None, "a trace has a name or a file"
        self._check_known(self.named.links, known)
        chosen = self.named.links or tuple(known)
        if not self.named.links and self.named.shape.name == "random-walk":
            chosen = tuple(link for link in known if "->" in link)
        return {link: self.named.speed(run_s, link) for link in chosen}

    def _check_known(self, names: Sequence[str], known: Sequence[str]) -> None:
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(
                f"network trace {self.text}: there is no link {unknown[0]!r}; {did_you_mean(unknown[0], known)}"
            )


def network_trace(text: str) -> NetworkTrace:
    """Return what `--network-trace` names: a file of changes (`.yaml`), or a trace of the library.

    Raises:
        ConfigError: there is no such file or name, or something in it is wrong.
    """
    path = Path(text)
    if path.suffix in _SUFFIXES or path.is_file():
        changes = read_changes(path)
        if changes.device_speed:
            raise ConfigError(
                f"{path}: devices: a network trace is about links only; leave out "
                f"{', '.join(changes.device_speed)} (`spantrain simulate --changes` takes both)"
            )
        if not changes.link_speed:
            raise ConfigError(f"{path}: needs at least one link under `links`, see docs/network-traces.md")
        return NetworkTrace(text=text, from_file=changes.link_speed)
    return NetworkTrace(text=text, named=named_trace(text))


def network_links(cluster: Cluster) -> dict[str, float]:
    """Return all that may change between a cluster's sites, with its normal bytes per second, by name.

    Ways come first, then uplinks and downlinks.
    """
    rates = {f"{link.source}->{link.target}": link.bandwidth_bytes_per_s for link in cluster.links}
    for site in cluster.sites:
        lines = {"up": site.uplink_bandwidth_bytes_per_s, "down": site.downlink_bandwidth_bytes_per_s}
        rates |= {f"{site.name} {way}": rate for way, rate in lines.items() if rate is not None}
    return rates
