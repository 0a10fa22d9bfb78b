"""What a probe tells of its machine, read within bounds; and several machines asked at once."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from importlib import resources
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from typing import TypeVar

from spantrain.config.files.json_codec import from_json
from spantrain.config.files.parsing import parse_json
from spantrain.core.records import Record
from spantrain.errors import Interrupted, ProtocolError, SpanTrainError, UsageError
from spantrain.reach.machines import Machine, at_once, run_python

T = TypeVar("T")

_PROBE_S, _DEEP_PROBE_S = 60.0, 240.0
"""Loading torch from a slow disk takes minutes."""
_LONGEST_TEXT, _MOST_ENTRIES = 400, 64
_LARGEST = 2.0**62


def _check(value: object, what: str) -> None:
    """Refuse what no machine is: numbers out of range, texts that steer a terminal or never end, endless lists."""
    if isinstance(value, str) and (len(value) > _LONGEST_TEXT or not value.isprintable()):
        raise ValueError(f"{what}: must be a line of at most {_LONGEST_TEXT} printable characters")
    if isinstance(value, float) and not (-_LARGEST if what.endswith("offset_s") else 0) <= value < _LARGEST:
        raise ValueError(f"{what}: must be a number from 0, got {value:g}")
    if isinstance(value, tuple | Mapping):
        if len(value) > _MOST_ENTRIES:
            raise ValueError(f"{what}: has {len(value)} entries, at most {_MOST_ENTRIES} are read")
        for entry in value if isinstance(value, tuple) else (*value, *value.values()):
            _check(entry, what)


class CheckedAnswer(Record):
    """Base of what came from another machine."""

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(getattr(self, one.name), one.name)


class FoundInterface(CheckedAnswer):
    """A network interface with an address that others may reach."""

    name: str
    addresses: tuple[str, ...]
    """With the length of the network's part, as `10.0.0.5/24`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.addresses:
            ip_interface(address)

    def networks(self) -> tuple[IPv4Interface | IPv6Interface, ...]:
        """Return the addresses with their networks."""
        return tuple(map(ip_interface, self.addresses))


class FoundAccelerator(CheckedAnswer):
    """A GPU, as the vendor's tool or the system names it."""

    name: str
    vendor: str
    """nvidia, amd, intel, jetson or apple."""
    memory_bytes: float | None = None
    free_bytes: float | None = None
    driver: str | None = None
    power_w: float | None = None
    slowed: tuple[str, ...] = ()
    """Why its clock is lower than it could be, but for idleness and limits that somebody has set."""


class TorchView(CheckedAnswer):
    """What torch says of the GPUs once it is loaded."""

    gpus: tuple[str, ...]
    """Their names, by torch's numbers."""
    made_for: str | None
    """The version of CUDA or ROCm that it was built for."""
    error: str


class MachineFacts(CheckedAnswer):
    """One machine as its probe tells it; None where it could not be found out."""

    hostname: str
    system: str
    python: str
    executable: str
    processors: int
    memory_bytes: float | None
    free_bytes: float | None
    disk_free_bytes: float
    """Of the home folder's file system."""
    interfaces: tuple[FoundInterface, ...]
    accelerators: tuple[FoundAccelerator, ...]
    packages: Mapping[str, str]
    """Versions, by the names of distributions."""
    digests: Mapping[str, str]
    """Of SpanTrain's code (`spantrain`), and of the paths that were asked for."""
    testbed: Mapping[str, str] = field(default_factory=dict)
    """What an emulated network lacks."""
    torch: TorchView | None = None
    curve_bytes_per_s: float | None = None
    home_problem: str = ""
    """Why nothing can be kept in the home folder."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its addresses, those of IPv4 first."""
        found = [one.ip for interface in self.interfaces for one in interface.networks()]
        return tuple(str(one) for one in sorted(found, key=lambda ip: ip.version))


def read_facts(text: str, source: str) -> MachineFacts:
    """Read what a probe printed; lines before the last are a login's greetings.

    Raises:
        ProtocolError: it is no such thing, or larger than any machine.
    """
    return read_answer(MachineFacts, text.strip().rpartition("\n")[2], source)


def read_answer(kind: type[T], line: str, source: str) -> T:
    """Read one line of a program's answers.

    Raises:
        ProtocolError: it is no such thing.
    """
    try:
        data = parse_json(line, source, remedy="see what a login prints there")
    except UsageError as error:
        raise ProtocolError(str(error)) from None
    return from_json(kind, data, source, error=ProtocolError, wire=True)


def probe(
    machine: Machine, stop: threading.Event | None = None, *, deep: bool = False, paths: Sequence[str] = ()
) -> MachineFacts:
    """Ask a machine what it is.

    Args:
        machine: which.
        stop: ends the wait when it is set.
        deep: load torch there and time encryption, too.
        paths: files and folders there whose digests are wanted.

    Raises:
        PeerLostError: it cannot be reached.
        ProtocolError: what it prints is no answer.
    """
    words = (*(["--deep"] if deep else []), *paths)
    limit_s = _DEEP_PROBE_S if deep else _PROBE_S
    said = run_python(machine, program("probe"), *words, timeout_s=limit_s, stop=stop)
    return read_facts(said, f"answer of {machine}")


def program(name: str) -> str:
    """Return the source of one of `reach.programs`, to be sent."""
    return (resources.files("spantrain.reach.programs") / f"{name}.py").read_text(encoding="utf-8")


def ask_all(machines: Sequence[Machine], ask: Callable[[Machine, threading.Event], T]) -> list[T | SpanTrainError]:
    """Ask machines at once; return the answers in their order, and errors in place of those that failed."""

    def asked(machine: Machine) -> T | SpanTrainError:
        try:
            return ask(machine, stop)
        except (UsageError, Interrupted):
            raise
        except SpanTrainError as error:
            return error

    stop = threading.Event()
    return at_once(asked, machines, stop)
