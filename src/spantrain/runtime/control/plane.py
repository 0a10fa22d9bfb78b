"""The control plane: a protocol of typed requests and answers, over gRPC.

A request is a `Record` that says under which name it travels and what type its answer has. What arrives is
read strictly, and refused if it does not fit. What waits for others is answered with nothing after a while, and asked
again; so whatever is asked may be asked twice.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.records import Record
from spantrain.errors import PeerLostError, ProtocolError
from spantrain.transport.control.protocol import Handler, RemoteRefusal

if TYPE_CHECKING:
    from spantrain.transport.control.client import ControlClient

HOLD_S = 10.0
"""How long the coordinator keeps a request that must wait for others; then it is asked again."""
AGAIN = "again"
"""The key of an answer that is none yet."""
_CALL_S = 600.0
"""The longest that one call may take, far more than the coordinator holds any: waits end by the watch."""
_LOOK_S = 0.25
"""How often one who waits for the coordinator looks whether the order is still wanted."""

A_co = TypeVar("A_co", covariant=True)
A = TypeVar("A")


class Named(Record, Generic[A_co]):
    """What is asked for under a name, and answered with one type; `class Ping(Named[Pong], name="ping")`."""

    wire_name: ClassVar[str]
    answer: ClassVar[type[Any]]

    def __init_subclass__(cls, *, name: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if name:
            cls.wire_name = name
            (cls.answer,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]


class Request(Named[A_co]):
    """What a worker asks of its coordinator."""


class OrderRequest(Request[A_co]):
    """What a worker asks for the sake of its order; who has none is refused unread."""


class Order(Named[A_co]):
    """What a worker is to carry out; its answer is the result."""


class ControlPlane:
    """The way to its coordinator of a worker that has joined; asks again while the network is away."""

    def __init__(self, client: "ControlClient", *, check: Callable[[], None], pause: Callable[[], object]) -> None:
        """Ask by a client; `check` raises when the order is over, `pause` waits before a call is made again."""
        self._client = client
        self._check = check
        self._pause = pause
        self._news = threading.Condition()

    def wake(self) -> None:
        """Have those who wait look at once whether the order is still wanted."""
        with self._news:
            self._news.notify_all()

    def ask(self, request: Request[A]) -> A:
        """Return the answer, once there is one.

        Raises:
            RemoteRefusal: the coordinator refuses.
            PeerLostError, Interrupted: it is lost, or has ended the order under way.
        """
        payload = to_json(request)
        while True:
            try:
                answer = self._call(request.wire_name, payload)
            except PeerLostError:
                self._check()
                self._pause()
            else:
                if not answer.get(AGAIN):
                    return read_answer(request, answer)
                self._check()

    def _call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        call = self._client.begin(method, payload, timeout_s=_CALL_S, done=self.wake)
        try:
            while True:
                with self._news:
                    if not call.ended:
                        self._news.wait(_LOOK_S)
                    if call.ended:
                        break
                self._check()
        finally:
            call.cancel()
        return call.result()


def read_answer(question: Named[A], answer: object) -> A:
    """Return what was answered.

    Raises:
        ProtocolError: it is of another form.
    """
    found: A = from_json(question.answer, answer, f"answer to {question.wire_name}", error=ProtocolError)
    return found


def handlers_of(
    requests: Iterable[type[Request[Any]]],
    answer: Callable[[str, Request[Any]], object | None],
    *,
    admit: Callable[[str, type[Request[Any]]], None] = lambda _peer, _kind: None,
) -> dict[str, Handler]:
    """Return what answers plain requests, by their names.

    Args:
        requests: that are answered.
        answer: (who asks, request) -> its answer, or None: that it shall be asked again.
        admit: raises if this worker may not ask for such a thing now; before what it asks is read.
    """

    def handle(kind: type[Request[Any]], peer: str, payload: dict[str, Any]) -> dict[str, Any]:
        admit(peer, kind)
        found = answer(peer, from_json(kind, payload, f"{kind.wire_name} of {peer}", error=RemoteRefusal))
        plain: dict[str, Any] = {AGAIN: True} if found is None else to_json(found)
        return plain

    return {kind.wire_name: partial(handle, kind) for kind in requests}
