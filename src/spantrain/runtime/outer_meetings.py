"""Where the stages of a run that is one cluster of an outer optimizer meet before its steps and behind them."""

from collections.abc import Mapping
from threading import Condition

from spantrain.core.outer_stages import StageMeeting, StageReport
from spantrain.errors import Interrupted

__all__ = ["StageMeetings", "meeting_of"]


def meeting_of(reports: Mapping[str, StageReport | None]) -> StageMeeting | None:
    """Return what those who lead stages said; None if there is no outer optimizer."""
    said = {name: report for name, report in sorted(reports.items()) if report is not None}
    return StageMeeting(reports=said) if said else None


class StageMeetings:
    """Meetings by number; each of a run's devices comes to each, though only those that lead a stage say something."""

    def __init__(self, devices: frozenset[str]) -> None:
        self._devices = devices
        self._reports: dict[int, dict[str, StageReport | None]] = {}
        self._meetings: dict[int, StageMeeting] = {}
        self._changed = Condition()
        self._aborted: str | None = None

    def meet(self, device: str, number: int, report: StageReport | None) -> StageMeeting:
        """Bring what a device says; wait for the others; return what all said. Asked again, it answers the same.

        Raises:
            Interrupted: the run was aborted meanwhile.
        """
        with self._changed:
            assert device in self._devices, f"{device} has no part in this run"
            if number not in self._meetings:
                self._come(device, number, report)
            while number not in self._meetings and self._aborted is None:
                self._changed.wait(1.0)
            if number not in self._meetings:
                raise Interrupted(self._aborted or "the run was aborted")
            return self._meetings[number]

    def _come(self, device: str, number: int, report: StageReport | None) -> None:
        reports = self._reports.setdefault(number, {})
        reports[device] = report
        if reports.keys() == self._devices:
            meeting = meeting_of(self._reports.pop(number))
            assert meeting is not None, "devices meet only if an outer optimizer is there"
            self._meetings[number] = meeting
            self._meetings.pop(number - 2, None)
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """Let everybody who waits go."""
        with self._changed:
            self._aborted = reason
            self._changed.notify_all()
