"""Targets: what programs on other machines print, and what is made of it once it was read."""

import json
from pathlib import Path
from random import Random

from fuzz.mutation import changed, corrupted
from fuzz.target import Target
from spantrain.app.machines.checks import common_lines, machine_lines, way_lines
from spantrain.app.machines.describe import FoundMachine, described_cluster
from spantrain.app.reporter import SilentReporter
from spantrain.config.cluster_file import parse_cluster
from spantrain.config.cluster_text import cluster_text
from spantrain.errors import ProtocolError
from spantrain.reach.facts import read_answer, read_facts
from spantrain.reach.kept import KeeperLine
from spantrain.reach.machines import Machine
from spantrain.reach.pairs import PairReport

_GPU = {"name": "NVIDIA L4", "vendor": "nvidia", "memory_bytes": 2.4e10, "free_bytes": 2e10, "slowed": ["power brake"]}
_FACTS = {
    "hostname": "lab1", "system": "Linux 6", "python": "3.11.2", "executable": "/usr/bin/python3",
    "processors": 8, "memory_bytes": 1e10, "free_bytes": 9e9, "disk_free_bytes": 1e12,
    "interfaces": [{"name": "eth0", "addresses": ["10.0.0.5/24", "fd00::5/64"]}],
    "accelerators": [_GPU, {**_GPU, "name": "Odd GPU 7"}], "packages": {"torch": "2.8.0"},
    "digests": {"spantrain": "aa"}, "testbed": {"tun": ""}, "curve_bytes_per_s": 4e8,
    "torch": {"gpus": ["NVIDIA L4"], "made_for": "12.6", "error": ""},
}  # fmt: skip
_WAY = {
    "errors": {}, "address": "10.0.0.5", "local_address": "10.0.0.6", "seen_address": "10.0.0.6", "round_trip_s": 0.02,
    "clock_offset_s": -1.0, "interface_mtu": 1500, "path_mtu": 1400, "up_bytes_per_s": 1e7,
    "down_bytes_per_s": 1e6,
}  # fmt: skip

_KEPT = {
    "answer": {"found": True, "lacks": ["torch"], "missing": ["/data"], "pid": 7},
    "worker": "a", "line": "x", "ended": -9, "left_out": 3,
}  # fmt: skip


def _spoiled(chance: Random, value: object) -> str:
    text = json.dumps(changed(chance, value, times=chance.randrange(1, 3)), default=str)
    return text if chance.random() < 0.8 else corrupted(chance, text.encode()).decode(errors="replace")


def _describe(text: str) -> None:
    found = FoundMachine(machine=Machine(name="lab1", way="slurm", target="lab1"), facts=read_facts(text, "lab1"))
    list(machine_lines(found, cluster=None, deep=True, testbed=True))
    list(common_lines([found], ["/data"]))
    outcome = described_cluster([found], name="c", measure=False, reporter=SilentReporter())
    assert parse_cluster(cluster_text(outcome.cluster, notes=outcome.notes), source="written") == outcome.cluster


def _try(text: str) -> None:
    way = read_answer(PairReport, text, "lab1")
    list(way_lines(["a", "b"], {("a", "b"): way, ("b", "a"): way}))


def _target(name: str, value: object, run: object) -> Target:
    def on_text(case: str, _: Path) -> None:
        run(case)

    return Target(name=name, make=lambda chance: _spoiled(chance, value), run=on_text, refusals=(ProtocolError,))


def _hear(text: str) -> None:
    read_answer(KeeperLine, text, "lab1")


MACHINE_TARGETS = (
    _target("machine-facts", _FACTS, _describe),
    _target("machine-ways", _WAY, _try),
    _target("kept-workers", _KEPT, _hear),
)
