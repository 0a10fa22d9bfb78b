"""A link that shares itself among the messages that are on it."""

from collections.abc import Callable

from spantrain.core.speed import SpeedTrace
from spantrain.sim.clock import VirtualClock
from spantrain.sim.network.sending import Sending

Ended = Callable[[Sending], None]


def _left_s(sending: Sending) -> float:
    return sending.left_s


class Link:
    """Serves its messages at once, in equal shares, or one after the other.

    A message that is alone needs no event for its last byte: when that leaves is known (`Sending.end_s`) until another
    message comes. Only then, or when something waits for it (`tell_end`), is it watched.
    """

    def __init__(self, clock: VirtualClock, ended: Ended, *, fair: bool, speed: SpeedTrace | None) -> None:
        self._clock = clock
        self._ended = ended
        self._fair = fair
        self._speed = speed
        self._alone: Sending | None = None
        self._sendings: list[Sending] = []
        self._since_s = 0.0
        self._version = 0

    def add(self, sending: Sending) -> None:
        """Begin to carry a message."""
        now_s = sending.start_s = self._clock.now_s
        alone = self._alone
        if alone is not None:
            assert alone.end_s is not None
            if alone.end_s > now_s:
                self._watch(alone, now_s)
            self._alone = None
        if not self._sendings:
            self._carry_alone(sending, now_s)
            return
        self._advance(now_s)
        self._sendings.append(sending)
        self._plan_next(now_s)

    def tell_end(self, sending: Sending) -> None:
        """Say so when the message that is alone on the link has left."""
        if sending is self._alone:
            assert sending.end_s is not None
            self._clock.at(sending.end_s, self._end_alone, sending, sending.version)

    def withdraw(self) -> list[Sending]:
        """Return what is on the link with the work that is left, and stop carrying it."""
        now_s = self._clock.now_s
        alone = self._alone
        if alone is not None and alone.end_s is not None and alone.end_s > now_s:
            self._watch(alone, now_s)
        self._alone = None
        if self._sendings:
            self._advance(now_s)
        taken, self._sendings = self._sendings, []
        self._version += 1
        return taken

    def _carry_alone(self, sending: Sending, now_s: float) -> None:
        work_s = sending.left_s
        end_s = sending.end_s = now_s + work_s if self._speed is None else self._speed.end_s(now_s, work_s)
        self._alone = sending
        self._clock.at(end_s + sending.transfer.latency_s, sending.arrive, sending.version)

    def _end_alone(self, sending: Sending, version: int) -> None:
        if version == sending.version:
            self._alone = None
            self._ended(sending)

    def _watch(self, alone: Sending, now_s: float) -> None:
        """Take back what was planned for a message that is not alone any more."""
        alone.version += 1
        alone.end_s = None
        self._sendings = [alone]
        self._since_s = alone.start_s
        self._advance(now_s)

    def _served(self) -> list[Sending]:
        return self._sendings if self._fair else self._sendings[:1]

    def _advance(self, now_s: float) -> None:
        """Take what has been done since the last change off what is served."""
        if now_s > self._since_s:
            served = self._served()
            done_s = now_s - self._since_s if self._speed is None else self._speed.work_s(self._since_s, now_s)
            for sending in served:
                sending.left_s = max(0.0, sending.left_s - done_s / len(served))
            self._since_s = now_s

    def _plan_next(self, now_s: float) -> None:
        """Ask to be called when the next one of what is served will be through."""
        self._version += 1
        if len(self._sendings) == 1 or not self._fair:
            first = self._sendings[0]
            work_s = first.left_s
        else:
            first = min(self._sendings, key=_left_s)
            work_s = first.left_s * len(self._sendings)
        end_s = now_s + work_s if self._speed is None else self._speed.end_s(now_s, work_s)
        self._clock.at(end_s, self._end, first, self._version)

    def _end(self, sending: Sending, version: int) -> None:
        if version != self._version:
            return  # the shares have changed since
        sent_s = sending.end_s = self._clock.now_s
        if len(self._sendings) == 1:
            self._sendings.clear()
        else:
            self._advance(sent_s)
            self._sendings.remove(sending)
            self._plan_next(sent_s)
        self._clock.at(sent_s + sending.transfer.latency_s, sending.arrive, sending.version)
        self._ended(sending)
