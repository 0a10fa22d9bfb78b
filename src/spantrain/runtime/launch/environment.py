"""The one place that reads environment variables."""

import re
from collections.abc import Mapping
from dataclasses import field

from spantrain.core.records import Record
from spantrain.errors import UsageError
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import JoinToken

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CUDA_DEVICE = re.compile(r"\d+|-1|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_INTERFACE = re.compile(r"[^\s/,]{1,15}")


class Launch(Record):
    """What a launcher of many processes (torchrun, or a script like it) tells each of them."""

    rank: int
    world_size: int
    local_rank: int | None
    """None where the launcher does not tell."""
    master_address: str
    master_port: int


class Environment(Record):
    """What the environment says to a worker; None where it says nothing. An empty variable says nothing, but see below.

    A launcher of many processes (torchrun, or a script like it) sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    Gloo reads GLOO_SOCKET_IFNAME; CUDA reads CUDA_VISIBLE_DEVICES, indices or identifiers, where empty or -1 hides all.
    These are checked, so that nonsense is told before anything else fails by it.
    """

    launch: Launch | None = None
    """From RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT."""
    join_token: str | None = field(default=None, repr=False)
    """From SPANTRAIN_TOKEN: unlike an option, other users of the machine cannot see it."""
    relay_token: str | None = field(default=None, repr=False)
    """From SPANTRAIN_RELAY_TOKEN."""
    slurm_nodes: str | None = None
    """From SLURM_JOB_NODELIST, in Slurm's short form."""
    gloo_interfaces: str | None = None
    """From GLOO_SOCKET_IFNAME."""
    agent_has_store: bool = False
    """From TORCHELASTIC_USE_AGENT_STORE: whether torchrun's own process has the store at MASTER_ADDR."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Read what `os.environ` holds.

        Raises:
            UsageError: a variable makes no sense; all such variables are in the message.
        """
        said = {name: text.strip() for name, text in variables.items() if text.strip()}
        is_launched = "RANK" in said or "WORLD_SIZE" in said
        problems = _launcher_problems(said) if is_launched else []
        interfaces = said.get("GLOO_SOCKET_IFNAME")
        if interfaces and not all(_INTERFACE.fullmatch(name.strip()) for name in interfaces.split(",")):
            problems.append(f"GLOO_SOCKET_IFNAME is {interfaces!r}, wanted interface names, e.g. eth0 or eth0,eth1")
        problems += _cuda_problems(variables.get("CUDA_VISIBLE_DEVICES", ""))
        for name, parse in (("SPANTRAIN_JOIN", Address.parse), ("SPANTRAIN_TOKEN", JoinToken.parse)):
            if name in said:
                try:
                    parse(said[name])
                except UsageError as error:  # that of a token does not repeat it
                    problems.append(f"{name}: {error}")
        if problems:
            raise UsageError("environment: " + "; ".join(problems))
        launch = None
        if is_launched:
            launch = Launch(
                rank=int(said["RANK"]),
                world_size=int(said["WORLD_SIZE"]),
                local_rank=int(said["LOCAL_RANK"]) if "LOCAL_RANK" in said else None,
                master_address=said["MASTER_ADDR"],
                master_port=int(said["MASTER_PORT"]),
            )
        return cls(
            launch=launch,
            join_token=said.get("SPANTRAIN_TOKEN"),
            relay_token=said.get("SPANTRAIN_RELAY_TOKEN"),
            slurm_nodes=said.get("SLURM_JOB_NODELIST"),
            gloo_interfaces=interfaces,
            agent_has_store=said.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def _launcher_problems(said: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a launcher's variables."""
    problems = []
    missing = [name for name in _NEEDED if name not in said]
    if missing:
        problems.append(
            f"{', '.join(missing)} not set: a launcher sets all of {', '.join(_NEEDED)}; "
            "set them, or unset RANK and WORLD_SIZE"
        )
    most = 10**6
    for name, low in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0), ("MASTER_PORT", 1)):
        high = 65535 if name == "MASTER_PORT" else most - (not low)
        text = said.get(name, str(low))
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not low <= int(text) <= high:
            problems.append(f"{name} is {text!r}, wanted a whole number from {low} to {high}")
        elif name == "WORLD_SIZE" and name in said:
            most = int(text)
    return problems


def _cuda_problems(text: str) -> list[str]:
    """Return what is wrong with a list of CUDA devices, of which those behind a -1 are not used."""
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    problems = []
    if not all(_CUDA_DEVICE.fullmatch(entry) for entry in entries):
        problems.append(f"CUDA_VISIBLE_DEVICES is {text!r}, wanted indices or identifiers, e.g. 0,1")
    visible = entries[: entries.index("-1")] if "-1" in entries else entries
    if len(set(visible)) != len(visible):
        problems.append(f"CUDA_VISIBLE_DEVICES is {text!r}: a device is named twice")
    return problems
