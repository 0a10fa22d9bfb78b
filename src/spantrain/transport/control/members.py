"""Who has joined: names by certificate; wrong tokens slowed down."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from spantrain.core.names import is_member_name
from spantrain.errors import UsageError
from spantrain.transport.connection.bounds import RefusalCounter
from spantrain.transport.control.protocol import RemoteRefusal


def check_name(name: str) -> None:
    """Make sure that a device's name can stand in a certificate.

    Raises:
        UsageError: it is empty, longer than 64, or has other characters.
    """
    if not is_member_name(name):
        raise UsageError(
            f"a device cannot join as {name!r}: a name has 1 to 64 letters, digits or . _ : @ / - "
            "and begins with a letter or digit"
        )


class Seat:
    """A name that is being joined, or has been."""

    certificate_der: bytes | None = None
    """That is to stand for it."""


class Members:
    """The names in use and the certificates that stand for them; safe from any thread.

    A certificate that is not here is nobody's, even if this run's authority signed it: that is how a name is
    taken back from a holder that may still be running.
    """

    def __init__(self, *, max_peers: int, may_replace: Callable[[str, str], bool] = lambda _held, _by: False) -> None:
        """`may_replace`: whether a name in use is taken from its holder for who joins; another only if all is full."""
        self._may_replace = may_replace
        self._max_peers = max_peers
        self._seats: dict[str, Seat] = {}
        self._name_by_certificate: dict[bytes, str] = {}
        self._lock = threading.RLock()

    @contextmanager
    def joining(self, name: str) -> Iterator[Seat]:
        """Hold a name for a worker that is joining; at the end its `certificate_der` alone stands for it.

        Raises:
            RemoteRefusal: the name is in use, or there is no room; at the end: it was released meanwhile.
        """
        with self._lock:
            is_held = name in self._seats
            if is_held and not self._may_replace(name, name):
                raise RemoteRefusal(f"a worker has joined as {name} already and has not left")
            for held in self.names if not is_held and len(self._seats) >= self._max_peers else ():
                if self._may_replace(held, name):
                    self.release(held)
            if not is_held and len(self._seats) >= self._max_peers:
                raise RemoteRefusal(f"the run is full: {self._max_peers} workers have joined")
            seat = self._seats[name] = Seat()
        try:
            yield seat
        except BaseException:
            with self._lock:
                if self._seats.get(name) is seat and name not in self.names:
                    del self._seats[name]
            raise
        with self._lock:
            if self._seats.get(name) is not seat:
                raise RemoteRefusal(f"{name} was released while it was joining")
            assert seat.certificate_der is not None, "who has joined has a certificate"
            self.release(name)
            self._seats[name], self._name_by_certificate[seat.certificate_der] = seat, name

    def release(self, name: str) -> None:
        """Free a name; its certificate is nobody's from now on. Nothing happens if nobody has the name."""
        with self._lock:
            self._seats.pop(name, None)
            for certificate_der in [one for one, by in self._name_by_certificate.items() if by == name]:
                del self._name_by_certificate[certificate_der]

    def name_of(self, certificate_der: bytes) -> str | None:
        """Return whose certificate it is."""
        with self._lock:
            return self._name_by_certificate.get(certificate_der)

    @property
    def names(self) -> tuple[str, ...]:
        """Who has joined, sorted."""
        with self._lock:
            return tuple(sorted(self._name_by_certificate.values()))


_SOURCE_LIMIT = 1024


class JoinThrottle:
    """Decide whether an address that has shown wrong tokens may try again; time is an argument.

    >>> throttle = JoinThrottle(attempts=2, window_s=10.0)
    >>> throttle.record_failure(0.0, "10.0.0.9"), throttle.wait_s(1.0, "10.0.0.9")
    (None, 0.0)
    >>> throttle.record_failure(2.0, "10.0.0.9"), throttle.wait_s(3.0, "10.0.0.9")
    (None, 7.0)
    """

    def __init__(self, *, attempts: int, window_s: float) -> None:
        self._attempts = attempts
        self._window_s = window_s
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait_s(self, now_s: float, source: str) -> float:
        """Return how long an address must wait; 0 when it may try."""
        with self._lock:
            times = self._failures.get(source)
            if times is None or len(times) < self._attempts:
                return 0.0
            return max(0.0, times[0] + self._window_s - now_s)

    def record_failure(self, now_s: float, source: str) -> None:
        """Remember a wrong token; of the addresses seen, only the last thousand or so are remembered."""
        with self._lock:
            self._failures.setdefault(source, deque(maxlen=self._attempts)).append(now_s)
            self._failures.move_to_end(source)
            while len(self._failures) > _SOURCE_LIMIT:
                self._failures.popitem(last=False)


class Denied(Exception):
    """A request that gets a gRPC status instead of an answer."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def denied(refusals: RefusalCounter, reason: str, code: grpc.StatusCode, text: str) -> Denied:
    """Count a refusal, and return what to raise for it."""
    refusals.add(reason, text)
    return Denied(code, text)
