"""The pages on cluster files say what the program does."""

import re
from pathlib import Path

import pytest

from spantrain.config.cluster_file import PRESET_NAMES, load_preset, parse_cluster
from spantrain.config.kinds import load_kinds
from spantrain.core.quantities import format_bytes
from spantrain.errors import ConfigError


@pytest.fixture
def page(examples: Path) -> str:
    return (examples.parent / "docs" / "cluster.md").read_text(encoding="utf-8")


def test_example_loads(page: str) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(parse_cluster(example, source="page").devices) == 5


def test_tables_are_true(page: str) -> None:
    for name in PRESET_NAMES:
        cluster = load_preset(name)
        assert f"| `{name}` | {len(cluster.devices)} | {len(cluster.hosts)} | {cluster.description} |" in page
    for kind in load_kinds().values():
        figures = (
            f"{kind.peak_fp16_flop_per_s / 1e12:g}",
            f"{kind.peak_fp32_flop_per_s / 1e12:g}",
            format_bytes(kind.memory_bytes),
            f"{kind.memory_bandwidth_bytes_per_s / 1e9:g}",
            f"{kind.power_w:g}",
        )
        assert f"| `{kind.name}` | {' | '.join(figures)} |" in page


def test_the_message_shown_is_the_message_given(page: str) -> None:
    text = """name: c
sites:
  - name: lab
    network: {bandwidth: -5 Mbit/s, latency: 1 ms}
    hosts:
      - {name: lab, devices: {rtx4090: 1}}
  - name: home
    network: {bandwidth: 1 Gbit/s, latency: 1 ms}
    hosts:
      - {name: home, devices: {t4: 1}}
links:
"""
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, source="cluster.yaml")
    assert str(caught.value) in page
