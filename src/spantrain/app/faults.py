"""Faults on purpose: workers that this machine has started are killed, stopped or started again; sites are cut off.

By a file when steps have ended (`--faults`), or at any moment by `spantrain testbed kill` and its like.
"""

import json
import signal
import threading
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from spantrain.app.live_requests import FAULTS, answer, answered, ask, requests_heard, taken
from spantrain.config.files.json_codec import from_json, to_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import read_text
from spantrain.core.records import Record
from spantrain.errors import ConfigError, SpanTrainError

if TYPE_CHECKING:
    from spantrain.app.session import Session

LONGEST_PAUSE_S = 3600.0
_ANSWER_S = 10.0
_REMEDY = 'write [{"after_step": 4, "what": "kill", "device": "lab-1"}, {"after_step": 9, "what": "restart", ...}]'


class FaultKind(StrEnum):
    """What is done to a device's worker, or to the testbed's links between sites."""

    KILL = "kill"
    PAUSE = "pause"
    """It stands still for some seconds."""
    RESTART = "restart"
    """It was killed, and is started again."""
    DRAIN = "drain"
    PARTITION = "partition"
    """Nothing passes between two sites, or one and all others, until they are healed."""
    HEAL = "heal"


_OF_LINKS = (FaultKind.PARTITION, FaultKind.HEAL)


class Fault(Record):
    """One fault."""

    after_step: int
    """Steps done before it."""
    what: FaultKind
    device: str = ""
    """Whose worker is meant; none for links."""
    seconds: float = 3.0
    """How long it stands still, if it does."""
    sites: tuple[str, ...] = ()
    """Two sites whose links are meant, or one whose links to all others are."""

    def __post_init__(self) -> None:
        if self.after_step < 0 or not 0 < self.seconds <= LONGEST_PAUSE_S:
            raise ValueError(f"after_step is 0 or more, and seconds are over 0 and at most {LONGEST_PAUSE_S:g}")
        if self.what in _OF_LINKS:
            if self.device or len(set(self.sites)) != len(self.sites) or len(self.sites) not in (1, 2):
                raise ValueError(f'{self.what} takes no device, but "sites": one, or two that differ')
        elif self.sites or not self.device:
            raise ValueError(f'{self.what} takes a "device", and no sites')


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Read faults from a JSON file, a list.

    Raises:
        ConfigError: it is no such list; says which entry is wrong.
    """
    data = parse_json(read_text(path, remedy=_REMEDY), str(path), error=ConfigError, remedy=_REMEDY)
    found: tuple[Fault, ...] = from_json(tuple[Fault, ...], data, str(path), error=ConfigError)
    return found


def ask_for_fault(run: Path, fault: Fault) -> None:
    """Have a fault made at once in a run that is under way, and return when it was.

    Raises:
        ConfigError: no such run is under way, it has no such device, or the fault cannot be made now; says why.
    """
    nowhere = (
        "no run whose workers this machine has started is under way there; give the folder that --out named (workers "
        "of `train --listen` are ended on their own machines)"
    )
    ask(run, fault.device, FAULTS, json.dumps(to_json(fault)), nowhere=nowhere)
    refusal = answered(run, fault.device, FAULTS, _ANSWER_S)
    if refusal:
        raise ConfigError(refusal)


class FaultInjector:
    """Makes the faults of a run as its steps end, and those that are asked for meanwhile."""

    def __init__(self, faults: tuple[Fault, ...], session: "Session", run: Path) -> None:
        """Take faults of a session on this machine; `run`: the folder where others are asked for.

        Raises:
            ConfigError: its workers were started elsewhere, or it has no such device.
        """
        self._left, self._session, self._run = list(faults), session, run
        if faults and session.workers is None:
            raise ConfigError("--faults: only workers that this machine has started can be killed; leave out --listen")
        if session.testbed is None and any(fault.what in _OF_LINKS for fault in faults):
            raise ConfigError("--faults: only a testbed's links can be cut; leave out --no-network, and run as root")
        sites = [site.name for site in session.cluster.sites]
        for name in sorted({fault.device for fault in faults} - {*session.cluster.device_by_name, ""}):
            raise ConfigError(f"--faults: there is no device {name}; this run has {', '.join(session.devices)}")
        for name in sorted({name for fault in faults for name in fault.sites} - set(sites)):
            raise ConfigError(f"--faults: there is no site {name}; this run has {', '.join(sites)}")

    def hearing(self) -> AbstractContextManager[None]:
        """Let faults be asked for."""
        names = self._session.cluster.device_by_name if self._session.workers else ()
        return requests_heard(self._run, names, FAULTS)

    def look(self) -> None:
        """Make those that were asked for since."""
        for device, text in taken(self._run, FAULTS).items():
            try:
                data = parse_json(text, FAULTS, error=ConfigError, remedy="use spantrain testbed kill")
                said = self._make_now(from_json(Fault, data, FAULTS, error=ConfigError))
            except SpanTrainError as error:
                said = str(error)
            answer(self._run, device, FAULTS, said)

    def after(self, steps_done: int) -> None:
        """Make those that are due, each once."""
        due = [fault for fault in self._left if fault.after_step <= steps_done]
        self._left = [fault for fault in self._left if fault not in due]
        for fault in due:
            self._make(fault)

    def _make_now(self, fault: Fault) -> str:
        """Make a fault, and return why it cannot be made, or nothing."""
        assert self._session.workers is not None, "nothing is heard"
        runs = fault.device in self._session.workers.running
        if fault.what is FaultKind.RESTART and runs:
            return f"{fault.device}: its worker is there; kill it first"
        if fault.what is not FaultKind.RESTART and not runs:
            return f"{fault.device}: has no worker now; `spantrain testbed restart` starts one"
        self._make(fault)
        return ""

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
            case FaultKind.PARTITION | FaultKind.HEAL:
                assert self._session.testbed is not None, "it was checked"
                self._session.testbed.cut(*fault.sites, is_cut=fault.what is FaultKind.PARTITION)
