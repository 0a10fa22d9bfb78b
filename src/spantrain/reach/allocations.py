"""Who the machines are: named for ssh, in an inventory, of a Slurm job, of a Kubernetes namespace."""

import itertools
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from spantrain.config.files.parsing import parse_json
from spantrain.config.files.problems import Problems
from spantrain.config.files.text_files import read_text
from spantrain.config.files.yaml_fields import parse_yaml
from spantrain.core.cluster import Host
from spantrain.core.names import is_name
from spantrain.errors import ConfigError, UsageError, WorkerError
from spantrain.reach.machines import PYTHON, Machine, Way, run_tool, this_machine

MAX_MACHINES = 1024
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_NODES = re.compile(r"([^\[\],\s]*)\[([\d,-]+)\]|([^\[\],\s]+)")
"""A part of a node's name: digits in brackets behind a beginning, or nothing but text."""


def named_machines(names: Iterable[str], way: Way, *, python: str, options: Sequence[str] = ()) -> tuple[Machine, ...]:
    """Return machines by what their way calls them: each is named after its host, without user, domain and port;
    `localhost` of ssh is this machine, without ssh.

    Raises:
        UsageError: a name is none, or there are too many.
    """
    targets = [name.strip() for name in names if name.strip()]
    if not 1 <= len(targets) <= MAX_MACHINES:
        raise UsageError(f"{len(targets)} machines are named; give 1 to {MAX_MACHINES}")
    machines: list[Machine] = []
    for target in targets:
        is_here = way == "ssh" and target == "localhost"
        host = socket.gethostname() if is_here else target.removeprefix("ssh://").rpartition("@")[2]
        stem = host if re.fullmatch(r"[\d.]+", host) else host.partition(":")[0].partition(".")[0]
        stem = _NO_NAME.sub("-", stem).strip("-._")[:60] or "host"
        names_left = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
        name = next(one for one in names_left if all(one != machine.name for machine in machines))
        if is_here:
            machines.append(this_machine(name))
            continue
        try:
            machines.append(Machine(name=name, way=way, target=target, python=python, options=tuple(options)))
        except ValueError as error:
            raise UsageError(str(error)) from None
    return tuple(machines)


def inventory_machines(path: Path, *, python: str, options: Sequence[str] = ()) -> tuple[Machine, ...]:
    """Read an inventory: a YAML list of hosts, each a name for ssh, or a table with `ssh` and if wanted `name`, `site`
    and `python`.

    Raises:
        UsageError: something in it is wrong.
    """
    problems = Problems(str(path))
    root = parse_yaml(read_text(path, remedy="write a list of hosts, e.g. `- lab1`"), problems)
    rows = []
    for item in root.items():
        row = item.table(required=("ssh",), optional=("name", "site", "python")) if item.is_table else {"ssh": item}
        rows.append(
            {key: value.name() if key in ("name", "site") else value.text() or "" for key, value in row.items()}
        )
    problems.check()
    found = named_machines((row["ssh"] for row in rows), "ssh", python=python, options=options)
    machines = tuple(
        replace(one, name=row.get("name", one.name), site=row.get("site"), python=row.get("python", one.python))
        for one, row in zip(found, rows, strict=True)
    )
    names = [one.name for one in machines]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: two machines are called {twice[0]}; give each a `name` of its own")
    return machines


def host_machines(
    hosts: Iterable[Host], *, python: str | None = None, options: Sequence[str] = ()
) -> tuple[Machine, ...]:
    """Return the hosts of a cluster: by ssh as it calls them, or else their address or name; those here without.

    `python`: the interpreter there, in the place of the hosts' own.

    Raises:
        UsageError: an address is none.
    """
    found = []
    for host in hosts:
        # Without an address, a host of this machine's name is this machine: `init` writes it so.
        is_here = host.ssh is None and (_is_own(host.address) if host.address else host.name == own_name())
        if is_here:
            machine = this_machine(host.name)
        else:
            target, own = host.ssh or host.address or host.name, python or host.python or PYTHON
            (machine,) = named_machines([target], "ssh", python=own, options=options)
        found.append(replace(machine, name=host.name, site=host.site))
    return tuple(found)


def own_name() -> str:
    """Return what this machine is called in a cluster file: its name without the domain."""
    name = socket.gethostname().partition(".")[0]
    return name if is_name(name) else "here"


def _is_own(address: str) -> bool:
    """Whether an address is this machine's: one that it could listen on."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.bind(where)
    except (OSError, UnicodeError):
        return False
    return True


def slurm_machines(nodes: str | None, *, python: str) -> tuple[Machine, ...]:
    """Return the nodes of a job, by its SLURM_JOB_NODELIST.

    Raises:
        UsageError: there is no such variable, or it makes no sense.
    """
    if nodes is None:
        raise UsageError("SLURM_JOB_NODELIST is not set: run it inside a job, e.g. in `salloc --nodes=2`")
    return named_machines(itertools.islice(node_names(nodes), MAX_MACHINES + 1), "slurm", python=python)


def node_names(nodes: str) -> Iterator[str]:
    """Yield the nodes that Slurm's short form stands for, as `scontrol show hostnames` does.

    >>> list(node_names("gpu[01-03,7],login,r[1-2]n[1-2]"))
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login', 'r1n1', 'r1n2', 'r2n1', 'r2n2']

    Raises:
        UsageError: it is no such form.
    """
    at = 0
    while at < len(nodes):
        parts: list[Sequence[str]] = []
        while (match := _NODES.match(nodes, at)) and match.end() > at:
            at = match.end()
            parts.append([match[3]] if match[3] else _numbered(match[1], match[2], nodes))
        if not parts or nodes[at : at + 1] not in ("", ","):
            raise UsageError(f"{nodes[:200]!r}: is no list of Slurm's nodes, such as gpu[01-04,07]")
        at += 1
        yield from map("".join, itertools.product(*parts))


def _numbered(stem: str, ranges: str, nodes: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not 0 <= last - first < MAX_MACHINES:
            raise UsageError(f"{nodes[:200]!r}: {part[:40]!r} is no range of at most {MAX_MACHINES} nodes")
        found += [f"{stem}{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return found


def kubernetes_machines(namespace: str, selector: str | None, *, python: str) -> tuple[Machine, ...]:
    """Return the pods of a namespace that run, as kubectl lists them.

    Raises:
        UsageError: kubectl is missing or fails, or no pod runs there.
    """
    options = ("--namespace", namespace)
    words = ["kubectl", *options, "get", "pods", "--output=json", *([f"--selector={selector}"] if selector else [])]
    try:
        said = run_tool(words)
    except WorkerError as error:
        raise UsageError(str(error)) from None
    data = parse_json(said, "kubectl's list of pods", remedy="see `kubectl get pods`")
    items, names = data.get("items") if isinstance(data, dict) else None, []
    for item in items if isinstance(items, list) else []:
        match item:
            case {"metadata": {"name": str(name)}, "status": {"phase": "Running"}}:
                names.append(name)
    if not names:
        raise UsageError(f"no pod runs in namespace {namespace}; start some, with an image that has Python 3")
    return named_machines(names, "kubernetes", python=python, options=options)
