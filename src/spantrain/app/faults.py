"""Faults on purpose: workers that this machine has started are killed, stopped or started again while they train."""

import signal
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from spantrain.app.session import Session
from spantrain.config.files.json_codec import from_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import read_text
from spantrain.errors import ConfigError

_REMEDY = 'write [{"after_step": 4, "what": "kill", "device": "lab-1"}, {"after_step": 9, "what": "restart", ...}]'


class FaultKind(StrEnum):
    """What is done to a device's worker."""

    KILL = "kill"
    PAUSE = "pause"
    """It stands still for some seconds."""
    RESTART = "restart"
    """It was killed, and is started again."""
    DRAIN = "drain"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    after_step: int
    """Steps done before it."""
    what: FaultKind
    device: str
    seconds: float = 3.0
    """How long it stands still, if it does."""

    def __post_init__(self) -> None:
        if self.after_step < 0 or not 0 < self.seconds <= 3600:
            raise ValueError("after_step is 0 or more, and seconds are over 0 and at most 3600")


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Read faults from a JSON file, a list.

    Raises:
        ConfigError: it is no such list; says which entry is wrong.
    """
    data = parse_json(read_text(path, remedy=_REMEDY), str(path), error=ConfigError, remedy=_REMEDY)
    found: tuple[Fault, ...] = from_json(tuple[Fault, ...], data, str(path), error=ConfigError)
    return found


class FaultInjector:
    """Makes the faults of a run as its steps end."""

    def __init__(self, faults: tuple[Fault, ...], session: Session) -> None:
        """Take faults of a session on this machine.

        Raises:
            ConfigError: its workers were started elsewhere, or it has no such device.
        """
        self._left, self._session = list(faults), session
        if faults and session.workers is None:
            raise ConfigError("--faults: only workers that this machine has started can be killed; leave out --listen")
        for name in sorted({fault.device for fault in faults} - set(session.cluster.device_by_name)):
            raise ConfigError(f"--faults: there is no device {name}; this run has {', '.join(session.devices)}")

    def after(self, steps_done: int) -> None:
        """Make those that are due, each once."""
        due = [fault for fault in self._left if fault.after_step <= steps_done]
        self._left = [fault for fault in self._left if fault not in due]
        for fault in due:
            self._make(fault)

    def _make(self, fault: Fault) -> None:
        workers = self._session.workers
        assert workers is not None, "it was checked"
        match fault.what:
            case FaultKind.KILL:
                workers.signal(fault.device, signal.SIGKILL)
            case FaultKind.PAUSE:
                workers.signal(fault.device, signal.SIGSTOP)
                timer = threading.Timer(fault.seconds, workers.signal, (fault.device, signal.SIGCONT))
                timer.daemon = True
                timer.start()
            case FaultKind.RESTART:
                self._session.start_again(fault.device)
            case FaultKind.DRAIN:
                self._session.coordinator.ask_to_leave(fault.device, "asked to by --faults")
