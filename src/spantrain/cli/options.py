"""Options that several commands share, each written once."""

from pathlib import Path
from typing import Annotated

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
    "chosen_cluster",
]

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


def chosen_cluster(preset: str | None, cluster_file: Path | None) -> Cluster:
    """Return the cluster that exactly one of the two options names."""
    if (preset is None) == (cluster_file is None):
        raise ConfigError("give either --preset NAME or --cluster FILE")
    if preset is not None:
        return load_preset(preset)
    assert cluster_file is not None
    return load_cluster(cluster_file)
