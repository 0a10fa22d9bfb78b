"""Workers that a launch is to start: of two sites, one with a cluster's machines and one with a box behind ssh."""

from dataclasses import replace
from pathlib import Path

from spantrain.app.launch.way import WantedWorkers
from spantrain.app.reporter import SilentReporter
from spantrain.config.cluster_file import parse_cluster

CLUSTER = """
name: two
sites:
  - name: lab
    network: {bandwidth: 10 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: big, backend: cuda, devices: {a100: 2}}
      - {name: small, backend: cuda, devices: {t4: 1}}
  - name: Field.2
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: box, address: 10.0.0.7, ssh: me@gate, backend: cpu, devices: {cpu: 1}}
links: [{between: all, bandwidth: 100 Mbit/s, latency: 10 ms}]
"""


class Told(SilentReporter):
    """Keeps what was noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def wanted_workers(folder: Path) -> WantedWorkers:
    """Return them, with a function of a file in that folder; logs go there, too."""
    cluster = parse_cluster(CLUSTER, source="this test")
    (folder / "net.py").write_text("def make(): ...\n")
    return WantedWorkers(
        cluster=cluster,
        devices=tuple(device.name for device in cluster.devices),
        log_folder=folder / "run" / "logs",
        functions=(f"{folder}/net.py:make", "package.module:data"),
        data=("/data/text with space",),
        encrypted=False,
    )


def on_this_machine(wanted: WantedWorkers, but: str = "") -> WantedWorkers:
    """Return them with all hosts but one on this machine, and without functions."""
    hosts = tuple(
        host if host.name == but else replace(host, address="127.0.0.1", ssh=None) for host in wanted.cluster.hosts
    )
    return replace(wanted, cluster=replace(wanted.cluster, hosts=hosts), functions=())
