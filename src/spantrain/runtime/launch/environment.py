"""The one place that reads environment variables."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spantrain.errors import UsageError
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import JoinToken

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CUDA_DEVICE = re.compile(r"\d+|-1|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_INTERFACE = re.compile(r"[^\s/,]{1,15}")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launcher of many processes (torchrun, or a script like it) tells each of them."""

    rank: int
    world_size: int
    local_rank: int | None
    """None where the launcher does not tell."""
    master_address: str
    master_port: int


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment says; None where it says nothing. An empty variable says nothing, but see below."""

    launch: Launch | None = None
    """From RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT."""
    gloo_interfaces: tuple[str, ...] | None = None
    """From GLOO_SOCKET_IFNAME."""
    cuda_devices: tuple[str, ...] | None = None
    """From CUDA_VISIBLE_DEVICES: indices or identifiers. Empty or -1 hides all: an empty tuple."""
    join_address: str | None = None
    """From SPANTRAIN_JOIN: HOST:PORT or unix:/path."""
    join_token: str | None = field(default=None, repr=False)
    """From SPANTRAIN_TOKEN: unlike an option, other users of the machine cannot see it."""
    slurm_nodes: str | None = None
    """From SLURM_JOB_NODELIST, in Slurm's short form."""
    agent_has_store: bool = False
    """From TORCHELASTIC_USE_AGENT_STORE: whether torchrun's own process has the store at MASTER_ADDR."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Read what `os.environ` holds.

        Raises:
            UsageError: a variable makes no sense; all such variables are in the message.
        """
        reader = _Reader(variables)
        environment = cls(
            launch=reader.launch(),
            gloo_interfaces=reader.interfaces(),
            cuda_devices=reader.cuda_devices(),
            join_address=reader.join_address(),
            join_token=reader.join_token(),
            slurm_nodes=reader.text("SLURM_JOB_NODELIST"),
            agent_has_store=reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if reader.problems:
            raise UsageError("environment: " + "; ".join(reader.problems))
        return environment


class _Reader:
    """Read one variable after another and collect what is wrong."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        """Return what a variable says, if anything."""
        return self._variables.get(name, "").strip() or None

    def _whole_number(self, name: str, low: int, high: int) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not low <= int(text) <= high:
            self.problems.append(f"{name} is {text!r}, wanted a whole number from {low} to {high}")
            return None
        return int(text)

    def launch(self) -> Launch | None:
        """Read the launcher's variables; RANK or WORLD_SIZE means that there is one."""
        if self.text("RANK") is None and self.text("WORLD_SIZE") is None:
            return None
        missing = [name for name in _NEEDED if self.text(name) is None]
        if missing:
            self.problems.append(
                f"{', '.join(missing)} not set: a launcher sets all of {', '.join(_NEEDED)}; "
                "set them, or unset RANK and WORLD_SIZE"
            )
        world_size = self._whole_number("WORLD_SIZE", 1, 10**6)
        rank = self._whole_number("RANK", 0, (world_size or 10**6) - 1)
        local_rank = self._whole_number("LOCAL_RANK", 0, (world_size or 10**6) - 1)
        port = self._whole_number("MASTER_PORT", 1, 65535)
        address = self.text("MASTER_ADDR")
        if rank is None or world_size is None or port is None or address is None:
            return None
        return Launch(rank=rank, world_size=world_size, local_rank=local_rank, master_address=address, master_port=port)

    def interfaces(self) -> tuple[str, ...] | None:
        """Read the network interfaces that Gloo should use."""
        text = self.text("GLOO_SOCKET_IFNAME")
        if text is None:
            return None
        names = tuple(name.strip() for name in text.split(","))
        if not all(_INTERFACE.fullmatch(name) for name in names):
            self.problems.append(f"GLOO_SOCKET_IFNAME is {text!r}, wanted interface names, e.g. eth0 or eth0,eth1")
        return names

    def cuda_devices(self) -> tuple[str, ...] | None:
        """Read which CUDA devices may be used; those behind a -1 may not."""
        text = self._variables.get("CUDA_VISIBLE_DEVICES")
        if text is None:
            return None
        entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
        if not all(_CUDA_DEVICE.fullmatch(entry) for entry in entries):
            self.problems.append(f"CUDA_VISIBLE_DEVICES is {text!r}, wanted indices or identifiers, e.g. 0,1")
        visible = entries[: entries.index("-1")] if "-1" in entries else entries
        if len(set(visible)) != len(visible):
            self.problems.append(f"CUDA_VISIBLE_DEVICES is {text!r}: a device is named twice")
        return tuple(visible)

    def join_address(self) -> str | None:
        """Read where to join."""
        text = self.text("SPANTRAIN_JOIN")
        if text is not None:
            self._checked("SPANTRAIN_JOIN", lambda: Address.parse(text))
        return text

    def join_token(self) -> str | None:
        """Read what to join with; no message repeats it."""
        text = self.text("SPANTRAIN_TOKEN")
        if text is not None:
            self._checked("SPANTRAIN_TOKEN", lambda: JoinToken.parse(text))
        return text

    def _checked(self, name: str, parse: Callable[[], object]) -> None:
        try:
            parse()
        except UsageError as error:
            self.problems.append(f"{name}: {error}")
