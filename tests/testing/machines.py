"""Machines for tests: tools that print what real ones have printed, and hosts that a real sshd makes of namespaces."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path

import psutil
import pytest

import spantrain
from spantrain.app.machines.describe import FoundMachine
from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.reach.facts import FoundAccelerator, FoundInterface, MachineFacts
from spantrain.reach.machines import Machine
from spantrain.testbed.control import runtime_dir
from spantrain.testbed.testbed import Testbed, why_unavailable
from testing.patience import PATIENCE_S

GIB = 2**30

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def tool(folder: Path, name: str, script: str) -> Path:
    """Put a program of this name into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def interpreter(folder: Path, name: str = "python-here", *, clock_ahead_s: float = 0.0) -> str:
    """A Python that has this SpanTrain, and perhaps another idea of the time."""
    (folder / f"{name}-site").mkdir()
    (folder / f"{name}-site" / "sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() + {clock_ahead_s}\n" if clock_ahead_s else ""
    )
    paths = f"{folder / f'{name}-site'}:{Path(spantrain.__path__[0]).parent}"
    return str(tool(folder, name, f'PYTHONPATH={shlex.quote(paths)} exec {shlex.quote(sys.executable)} "$@"'))


def ssh_config(folder: Path, hosts: Mapping[str, Sequence[str] | str]) -> Path:
    """Write what `ssh -F` needs to reach each host: an sshd for the one connection, started by these words.

    Or the address at which an sshd listens (`sshd_words`). Skips where there is no sshd.
    """
    if not Path(SSHD).exists():
        pytest.skip("needs sshd (Debian's openssh-server)")
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / f"{name}-key")]
        subprocess.run(words, check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, and Debian makes it when the service starts
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host-key\nAuthorizedKeysFile {folder}/user-key.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\n"
    )
    (folder / "known_hosts").write_text(f"* {(folder / 'host-key.pub').read_text()}")
    text = f"IdentityFile {folder}/user-key\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known_hosts\n"
    for name, way in hosts.items():
        if isinstance(way, str):
            text += f"Host {name}\n  HostName {way}\n"
            continue
        command = shlex.join([*way, *sshd_words(folder, "-i")])
        text += f"Host {name}\n  HostName {name}.test\n  ProxyCommand {command} 2>/dev/null\n"
    (folder / "ssh_config").write_text(text)
    return folder / "ssh_config"


def sshd_words(folder: Path, how: str) -> list[str]:
    """Return the words of the server that `ssh_config` here is for: `-i` for one connection, `-D` to listen."""
    return [SSHD, how, "-f", str(folder / "sshd_config")]


@contextlib.contextmanager
def joined(names: Sequence[str], *, latency_s: float, folder: Path) -> Iterator[Testbed]:
    """Give a network of places with a host each, joined by 50 Mbit/s; what is known of it lies in a folder."""
    if why_unavailable() is not None:
        pytest.skip(why_unavailable())
    cluster = Cluster(
        name="places", kinds=(), devices=(),
        sites=tuple(Site(name=one, hosts=(one,), bandwidth_bytes_per_s=1.25e8, latency_s=1e-4) for one in names),
        hosts=tuple(Host(name=one, site=one, devices=()) for one in names),
        links=tuple(
            Link(source=one, target=other, bandwidth_bytes_per_s=50e6 / 8, latency_s=latency_s)
            for one, other in permutations(names, 2)
        ),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        with Testbed.up(cluster) as network:
            yield network
        assert list(runtime_dir().iterdir()) == [], "of the testbed"


def wait_for_sshd(network: Testbed, places: Iterable[str]) -> None:
    """Return when the servers that were started at these places can be reached."""
    for place in places:
        dial = f"until (: </dev/tcp/{network.address(place)}/22) 2>/dev/null; do sleep 0.05; done"
        assert network.popen(place, ["timeout", str(PATIENCE_S), "bash", "-c", dial]).wait() == 0, f"no sshd at {place}"


def by_ssh(name: str, config: Path, python: str) -> Machine:
    return Machine(name=name, way="ssh", target=name, python=python, options=("-F", str(config)))


def workers(cache: Path) -> dict[str, psutil.Process]:
    """Processes that run in code of this cache, by device."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            if process.cwd().startswith(str(cache)) and process.status() != psutil.STATUS_ZOMBIE:
                words = process.cmdline()
                found[words[words.index("--name") + 1]] = process
    return found


def machine(name, *gpus, address="10.0.0.1/24", site=None, **more):
    """A machine as its probe could have told it."""
    facts = MachineFacts(
        hostname=name, system="Linux 6", executable="python3", processors=8,
        interfaces=(FoundInterface(name="eth0", addresses=(address,)),), accelerators=gpus,
        **{
            "python": "3.11.2", "memory_bytes": 32.0 * GIB, "free_bytes": 20.5 * GIB, "disk_free_bytes": 1e12,
            "packages": {}, "digests": {}, **more,
        },
    )  # fmt: skip
    return FoundMachine(machine=Machine(name=name, way="slurm", target=name, site=site), facts=facts)


def gpu(name, vendor="nvidia", memory_gib=24.0, **more):
    return FoundAccelerator(name=name, vendor=vendor, memory_bytes=memory_gib * GIB, **more)
