"""Where the devices of a run meet for an outer optimizer, outside of steps."""

from collections.abc import Mapping
from threading import Condition

from spantrain.core.outer.stages import StageMeeting, StageReport
from spantrain.errors import Interrupted
from spantrain.runtime.control.plane import HOLD_S
from spantrain.transport.control.protocol import RemoteRefusal


def meeting_of(reports: Mapping[str, StageReport | None]) -> StageMeeting | None:
    """Return what those who lead stages said; None if there is no outer optimizer."""
    said = {name: report for name, report in sorted(reports.items()) if report is not None}
    return StageMeeting(reports=said) if said else None


class StageMeetings:
    """Meetings one after another; each of a run's devices comes to each, though only those that lead a stage speak."""

    def __init__(self, members: frozenset[str], *, hold_s: float = HOLD_S) -> None:
        self._members = members
        self._hold_s = hold_s
        self._number = 0
        """Of the meeting that all come to next."""
        self._reports: dict[str, StageReport | None] = {}
        self._meeting: StageMeeting | None = None
        """The one before."""
        self._changed = Condition()
        self._aborted: str | None = None

    def meet(self, device: str, number: int, report: StageReport | None) -> StageMeeting | None:
        """Bring what a device says; wait for the others; return what all said, or None if it takes longer.

        Asked again, it answers the same.

        Raises:
            RemoteRefusal: this device has no part in the run, or comes to a meeting that is not now.
            Interrupted: the run was aborted meanwhile.
        """
        with self._changed:
            again = number == self._number - 1 and self._meeting is not None
            if device not in self._members or not (number == self._number or again):
                raise RemoteRefusal(f"device {device} comes to meeting {number}; the next one is {self._number}")
            if number == self._number:
                self._come(device, report)
            self._changed.wait_for(lambda: number < self._number or self._aborted is not None, self._hold_s)
            if number < self._number:
                return self._meeting
            if self._aborted is not None:
                raise Interrupted(self._aborted)
            return None

    def _come(self, device: str, report: StageReport | None) -> None:
        self._reports.setdefault(device, report)
        leaders = [name for name, said in self._reports.items() if said and said.order]
        if len(leaders) > 1:
            del self._reports[device]
            raise RemoteRefusal(f"device {device} orders what all do for the outer optimizer, as {leaders[0]} has done")
        if self._reports.keys() == self._members:
            self._meeting, self._reports = meeting_of(self._reports), {}
            assert self._meeting is not None, "devices meet only if an outer optimizer is there"
            self._number += 1
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """Let everybody who waits go."""
        with self._changed:
            self._aborted = reason
            self._changed.notify_all()
