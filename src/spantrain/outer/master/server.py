"""The master as a server: gRPC handlers around the service, a clock for it, and its folder."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from spantrain.errors import ProtocolError, UsageError
from spantrain.outer.link.codec import decode_event, decode_value, encode_value
from spantrain.outer.link.link import MemberFacts
from spantrain.outer.link.session import HOLD_S, MAX_BATCH
from spantrain.outer.link.status import MasterStatus
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.files import MasterFiles, StateNotKept
from spantrain.outer.master.report import status_of
from spantrain.outer.master.service import MasterService
from spantrain.transport.connection.threads import ReliedOnThread
from spantrain.transport.control.protocol import RemoteRefusal
from spantrain.transport.control.server import ControlServer

T = TypeVar("T")
_MIN_SLEEP_S = 0.01
_GRACE_S = 0.5

_log = logging.getLogger(__name__)


class MasterServer:
    """Answers members from `start` to `close`; holds no parameters.

    Threads of the control plane bring what members say to the service one after the other; one more thread wakes the
    service when time itself changes something. A master that cannot write its state stops answering and says why.
    """

    def __init__(self, *, bind: str, state_dir: Path, config: MasterConfig) -> None:
        """`bind`: HOST:PORT, with the next port for members that have joined; port 0 takes any two.

        Raises:
            UsageError: the address is none, or the folder is in use, damaged, or of other shards or data.
        """
        with contextlib.ExitStack() as stack:
            self._files = MasterFiles(state_dir)
            stack.callback(self._files.close)
            self._service = MasterService(config, self._files, time.monotonic())
            self._server = ControlServer(
                bind=bind,
                handlers={
                    "enter": self._enter,
                    "tell": self._tell,
                    "listen": self._listen,
                    "leave": self._leave,
                    "status": lambda _name, _payload: {"status": encode_value(self.status())},
                },
                on_join=lambda name, brief: self._alone(lambda now_s: self._service.join(now_s, name, brief)),
                max_peers=config.max_members,
                credentials=self._files.credentials,
                may_replace=lambda held, by: held == by or self._service.connections.get(held) is None,
                refusals=self._service.refusals,
            )
            self.token = self._server.token
            """What members join with; also in the folder's `token`."""
            stack.pop_all()
        self._changed = threading.Condition()
        """Held by whoever is in the service."""
        self._wakes_s: float | None = None
        self._closing = False
        self.failure: str | None = None
        """Why it cannot go on; None while it can."""
        self._thread = ReliedOnThread(self._keep_time, name="outer-master-clock", died=self._fail)

    def start(self) -> None:
        """Listen and answer.

        Raises:
            UsageError: the address is in use, or cannot be listened on.
        """
        try:
            self._server.start()
        except UsageError:
            self._files.close()
            raise
        self._thread.start()

    def close(self) -> None:
        """Answer no more; nothing of it is left but its folder. Once more does nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._service.connections.close_all("the master is stopping")
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._server.stop(_GRACE_S)
        self._files.close()

    def __enter__(self) -> "MasterServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where members join, as they can dial it."""
        return self._server.join_address

    def status(self) -> MasterStatus:
        """Return what it knows of everybody."""
        with self._changed:
            return status_of(self._service, address=self.address, now_s=time.monotonic())

    # What members call, each in a thread of the control plane.

    def _enter(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        facts = decode_value(MemberFacts, payload.get("facts"), "facts")
        number, welcome = self._alone(lambda now_s: self._service.enter(now_s, name, facts))
        return {"connection": number, "welcome": encode_value(welcome)}

    def _tell(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        number, batch = _number(payload, "connection"), _number(payload, "batch")
        told = payload.get("events")
        if not isinstance(told, list) or len(told) > MAX_BATCH:
            raise ProtocolError(f"{name}: a batch must be a list of at most {MAX_BATCH} events")
        events = [decode_event(event) for event in told]
        return {"refused": self._alone(lambda now_s: self._service.tell(now_s, name, number, batch, events))}

    def _listen(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        number, after = _number(payload, "connection"), _number(payload, "after")
        outbox = self._alone(lambda now_s: self._service.outbox(now_s, name, number))
        first, notices = outbox.take(after, timeout_s=HOLD_S)
        return {"first": first, "notices": notices}

    def _leave(self, name: str, _payload: dict[str, Any]) -> dict[str, Any]:
        self._alone(lambda now_s: self._service.leave(now_s, name, "it left"))
        self._server.release(name)
        return {}

    def _alone(self, work: Callable[[float], T]) -> T:
        """Do something in the service, alone.

        Raises:
            RemoteRefusal: the master is stopping, or has failed.
        """
        with self._changed:
            if self.failure or self._closing:
                raise RemoteRefusal(self.failure or "the master is stopping")
            try:
                result = work(time.monotonic())
            except StateNotKept as error:
                self._fail(str(error))
                raise RemoteRefusal(str(error)) from None
            if (self._service.wake_s or float("inf")) < (self._wakes_s or float("inf")):
                self._changed.notify_all()
        return result

    def _fail(self, fault: str) -> None:
        with self._changed:
            self.failure = f"the master cannot go on: {fault}"
            _log.error("%s", self.failure)
            self._service.connections.close_all(self.failure)

    # Time.

    def _keep_time(self) -> None:
        earliest_s = 0.0
        while True:
            with self._changed:
                if self._closing or self.failure:
                    return
                now_s = time.monotonic()
                due_s = self._service.wake_s
                if due_s is None or max(due_s, earliest_s) > now_s:
                    self._wakes_s = due_s
                    self._changed.wait(None if due_s is None else max(due_s, earliest_s) - now_s)
                    continue
                earliest_s = now_s + _MIN_SLEEP_S
                try:
                    self._service.tick(now_s)
                except StateNotKept as error:
                    self._fail(str(error))


def _number(payload: dict[str, Any], key: str) -> int:
    value = payload.get(key)
    if type(value) is not int or value < 0:
        raise ProtocolError(f"{key} must be a number from 0 on, got {value!r}"[:200])
    return value
