"""Latency: pings through the mailbox, less the time that the software of both ends takes by itself.

A message of five int32 goes through the threads of two mailboxes and of two ZeroMQ contexts, through encryption and
two kernels; together that takes as long as some networks. Every message of training feels it, but it is the machines',
not the network's. So each side measures a round trip between two mailboxes of its own over the loopback interface,
at the same pace and just before, since a busy machine takes longer for both; the mean of both sides' is taken off: a
round trip uses each side's sending and receiving once, one over loopback uses one side's twice. What is left is the
network and the noise of two minima.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spantrain.profiler.network_probes import Echo, Prober
from spantrain.transport.mailbox.interface import Limits, MailboxLike
from spantrain.transport.mailbox.mailbox import Mailbox

_MIN_PINGS, _WARM_UP_PINGS = 15, 2
"""Of a sample; several samples, some time apart, find a moment in which every processor on their way is free."""
_GAP_S = 3e-3
"""Pings do not wait for each other, or the processors on the way would fall asleep in between and wake up slowly; and
they are far enough apart for none to wait behind the one before."""
_POLL_S = 1.0
_FRESH_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    """Five int32 there and back, many times; every figure is of one way, half of a round trip."""

    latency_s: float
    """The network's: the fastest, less what the software of both sides took; not below zero."""
    felt_s: float
    """What a message feels: the median, with the software, without the time that the other side's program held it."""
    software_s: float
    """What was taken off: the part of mailboxes, encryption and kernels, measured over loopback."""
    held_s: float
    """Median time between the other side's receiving and its answering: its program, not on any message's way."""


class LatencyMeter:
    """Measures the latency to one peer, in as many samples as there is time for."""

    def __init__(self, prober: Prober) -> None:
        """Ask both ends for what their software takes; connections are opened before the other side answers."""
        self._prober = prober
        self._software_s = (prober.ask_software_round_trip() + prober.software_round_trip_s()) / 2
        self._answers: list[tuple[float, float]] = []

    def sample(self, pings: int = _MIN_PINGS) -> RoundTrip:
        """Send pings; return what these and all before say."""
        self._answers += self._prober.ping(max(pings, _MIN_PINGS), _GAP_S)
        round_trips_s = [round_trip_s for round_trip_s, _ in self._answers]
        return RoundTrip(
            latency_s=max(0.0, (min(round_trips_s) - self._software_s) / 2),
            felt_s=statistics.median(round_trips_s) / 2,
            software_s=self._software_s / 2,
            held_s=statistics.median(held_s for _, held_s in self._answers),
        )


class Software:
    """What a round trip through a mailbox's own software takes, measured anew when the last figure is 10 s old.

    A device measures with one after another of its peers: in between neither its speed nor its load changes much.
    """

    def __init__(self, mailbox: MailboxLike, now_s: Callable[[], float] = time.monotonic) -> None:
        self._mailbox, self._now_s = mailbox, now_s
        self._found: tuple[float, float] | None = None

    def round_trip_s(self) -> float:
        """Return the seconds of `software_round_trip`."""
        now_s = self._now_s()
        if self._found is None or now_s - self._found[0] > _FRESH_S:
            self._found = (now_s, software_round_trip(self._mailbox))
        return self._found[1]


def software_round_trip(like: MailboxLike) -> float:
    """Return the seconds of the fastest round trip between two new mailboxes of this process, over loopback."""
    near, far = (
        Mailbox(name=name, limits=Limits(bulk_connections=1), encrypted=bool(like.public_key))
        for name in ("near", "far")
    )
    stop = threading.Event()
    echo = Echo(far, lambda: 0.0)

    def answer() -> None:
        while not stop.is_set():
            for message in far.receive(_POLL_S):
                echo.take(message)

    answering = threading.Thread(target=answer, name="echo of software_round_trip")
    try:
        for mailbox, other in ((near, far), (far, near)):
            mailbox.set_peers(0, [other.address], dial=False)
        for mailbox in (near, far):
            mailbox.dial()
        answering.start()
        prober = Prober(near, "far", lambda: 0.0)
        prober.ping(_WARM_UP_PINGS, _GAP_S)
        return min(round_trip_s for round_trip_s, _ in prober.ping(_MIN_PINGS, _GAP_S))
    finally:
        stop.set()
        far.wake()
        answering.join()
        far.close()  # it dialled: a goodbye to one that has gone would take its time
        near.close()
