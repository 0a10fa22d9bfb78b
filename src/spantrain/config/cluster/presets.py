"""Clusters by name: those of the papers, and the demo's."""

from importlib import resources

from spantrain.config.cluster.cluster_file import parse_cluster
from spantrain.config.files.problems import did_you_mean
from spantrain.core.cluster import Cluster
from spantrain.errors import ConfigError

PRESET_NAMES: tuple[str, ...] = (
    "laptop",
    "spantrain-setting-1",
    "spantrain-setting-2",
    "spantrain-table-1",
    "spantrain-cn",
    "asteroid-a-100",
    "asteroid-a-1000",
    "asteroid-b-100",
    "asteroid-b-1000",
    "asteroid-c-100",
    "asteroid-c-1000",
    "asteroid-d-100",
    "asteroid-d-1000",
)


_SHORT = {f"asteroid-{letter}": f"asteroid-{letter}-100" for letter in "abcd"}
"""Asteroid's clusters at 100 Mbit/s, its narrower network, when none is named."""


def load_preset(name: str) -> Cluster:
    """Return the cluster of a preset; hyphens may be left out.

    Raises:
        ConfigError: no preset has this name.
    """
    name = _SHORT.get(name, name)
    name = {known.replace("-", ""): known for known in PRESET_NAMES}.get(name.replace("-", ""), name)
    if name not in PRESET_NAMES:
        raise ConfigError(f"unknown preset {name!r}; {did_you_mean(name, PRESET_NAMES)}")
    file = resources.files("spantrain.config") / "presets" / f"{name}.yaml"
    return parse_cluster(file.read_text(encoding="utf-8"), source=f"preset {name}")
