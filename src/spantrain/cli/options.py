"""Options that several commands share, each written once."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spantrain.config.cluster_file import load_cluster
from spantrain.config.presets import PRESET_NAMES, load_preset
from spantrain.core.cluster import Cluster
from spantrain.errors import ConfigError

__all__ = [
    "ClusterFile",
    "Insecure",
    "Json",
    "Listen",
    "NoNetwork",
    "Out",
    "Preset",
    "at_speed",
    "check_folder",
    "chosen_cluster",
    "print_json",
    "session_options",
]

if TYPE_CHECKING:
    from spantrain.app.session import SessionOptions

Preset = Annotated[str | None, typer.Option("--preset", help=f"A ready cluster: {', '.join(PRESET_NAMES)}.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="A cluster file (docs/cluster.md).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output; the rest to stderr.")]
NoNetwork = Annotated[
    bool, typer.Option("--no-network", help="Do not emulate links: all workers on loopback, unshaped.")
]
Listen = Annotated[
    str | None,
    typer.Option(help="HOST:PORT on which to wait for workers of other machines, instead of starting them here."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Do not encrypt the data between workers.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write to; made when missing.")]


def at_speed(cluster: Cluster, emulated_speed: float) -> Cluster:
    """Return the cluster with its emulated devices at another fraction of their kinds' speed."""
    if not cluster.emulated:
        raise ConfigError(f"--emulated-speed: no device of {cluster.name} is emulated; leave it out")
    try:
        return replace(cluster, emulated_speed=emulated_speed)
    except ValueError as error:
        raise ConfigError(f"--emulated-speed: {error}") from None


def chosen_cluster(preset: str | None, cluster_file: Path | None) -> Cluster:
    """Return the cluster that exactly one of the two options names."""
    if (preset is None) == (cluster_file is None):
        raise ConfigError("give either --preset NAME or --cluster FILE")
    if preset is not None:
        return load_preset(preset)
    assert cluster_file is not None
    return load_cluster(cluster_file)


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder to write to that cannot be made, before any work is done for it; make nothing yet."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{option} {folder}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder}: {nearest} cannot be written to; choose another place")


def session_options(*, no_network: bool = False, listen: str | None = None, insecure: bool = False) -> "SessionOptions":
    """Return where workers run, as the options say."""
    from spantrain.app.session import SessionOptions

    return SessionOptions(listen=listen, network=not no_network, encrypted=not insecure)


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
