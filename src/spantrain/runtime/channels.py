"""Ways for messages outside the pipeline's routes: through a driver, from another thread than its own, or a mailbox."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from spantrain.core.messages import AnyKey, ControlKey
from spantrain.errors import ProtocolError
from spantrain.transport.mailbox.interface import Message
from spantrain.transport.mailbox.mailbox import MailboxLike

_POLL_S = 0.25

Tensors = tuple[torch.Tensor, ...]
TrySend = Callable[[str, ControlKey, Tensors], Tensors | None]
TryTake = Callable[[int, str], Tensors | None]
_Attempt = Callable[[TrySend, TryTake], Tensors | None]
"""Returns None as long as it cannot be done."""


class MailboxMessages(ABC):
    """Messages outside the pipeline's routes, now or not, by whoever takes in what comes to a mailbox."""

    def __init__(self, mailbox: MailboxLike) -> None:
        self._mailbox = mailbox
        self._come: dict[tuple[int, str], Tensors] = {}
        """What came that is no samples, by step and lane."""

    @abstractmethod
    def wait(self) -> None:
        """Take in what comes, or return after a moment."""

    def send_message(self, target: str, key: AnyKey, tensors: Tensors) -> None:
        """Send to another device; takes in what comes while there is no room."""
        while self.try_send(target, key, tensors) is None:
            self.wait()

    def wait_for_message(self, step: int, lane: str) -> Tensors:
        """Wait for a lane's message of a step."""
        while (come := self.try_take(step, lane)) is None:
            self.wait()
        return come

    def try_send(self, target: str, key: AnyKey, tensors: Tensors) -> Tensors | None:
        """Send if there is room; return nothing, or None if there is none."""
        return () if self._mailbox.send(target, key, tensors, timeout_s=0.0) else None

    def try_take(self, step: int, lane: str) -> Tensors | None:
        """Return a lane's message of a step, or None if it has not come."""
        return self._come.pop((step, lane), None)


class MailboxMessenger(MailboxMessages):
    """Those of a device whose mailbox no driver has."""

    def __init__(self, mailbox: MailboxLike, check_abort: Callable[[], None], step: int | None = None) -> None:
        """`step`: of whose exchange all messages must be, with one tensor each; None: they are of any."""
        super().__init__(mailbox)
        self._check_abort, self._step = check_abort, step

    def wait(self) -> None:
        """Take in what comes, or return after a moment.

        Raises:
            Interrupted: the order is over.
            ProtocolError: something else has come than should.
        """
        self._check_abort()
        for message in self._mailbox.receive(_POLL_S):
            self._check(message)
            self._come[message.key.step, message.key.lane] = message.tensors

    def _check(self, message: Message) -> None:
        key, step = message.key, self._step
        if step is None:
            if not isinstance(key, ControlKey):
                raise ProtocolError(f"{message.source} sent {key} to a device that has no part in the plan")
        elif key.step != step or len(message.tensors) != 1:
            what = f"{key} with {len(message.tensors)} tensors"
            raise ProtocolError(f"{message.source} sent {what} in the middle of an exchange of step {step}")


class DeferredMessages:
    """Messages that the thread of a step's end sends and waits for, by the driver, whose thread has the mailbox."""

    def __init__(self, wake: Callable[[], None], check_abort: Callable[[], None]) -> None:
        """`wake` makes an idle driver look here."""
        self._wake = wake
        self._check_abort = check_abort
        self._asked: SimpleQueue[tuple[_Attempt, Future[Tensors]]] = SimpleQueue()
        self._open: list[tuple[_Attempt, Future[Tensors]]] = []

    def send_message(self, target: str, key: ControlKey, tensors: Tensors) -> None:
        """Send to another device; returns when the mailbox has it."""
        self._have_done(lambda send, _take: send(target, key, tensors))

    def wait_for_message(self, step: int, lane: str) -> Tensors:
        """Wait for a lane's message of a step."""
        return self._have_done(lambda _send, take: take(step, lane))

    def serve(self, send: TrySend, take: TryTake) -> None:
        """Do what can be done now; called in the driver's thread."""
        while not self._asked.empty():
            self._open.append(self._asked.get())
        for deferred in list(self._open):
            attempt, done = deferred
            result = attempt(send, take)
            if result is not None:
                self._open.remove(deferred)
                done.set_result(result)

    def _have_done(self, attempt: _Attempt) -> Tensors:
        done: Future[Tensors] = Future()
        self._asked.put((attempt, done))
        self._wake()
        while not wait([done], _POLL_S).done:
            self._check_abort()
        return done.result()


Messenger = MailboxMessages | DeferredMessages
"""What carries messages outside the pipeline's routes."""


@dataclass(frozen=True)
class DriverChannel:
    """An exchange of a device whose driver hears from others: what is none of the exchange's is kept for the step.

    Each lane is used once.
    """

    driver: Messenger
    generation: int
    step: int

    def send(self, target: str, lane: str, tensor: torch.Tensor) -> None:
        """Send a tensor; takes in what comes while there is no room."""
        self.driver.send_message(target, ControlKey(self.generation, self.step, lane), (tensor,))

    def receive(self, lane: str) -> torch.Tensor:
        """Wait for the tensor of a lane, which names its sender."""
        return self.driver.wait_for_message(self.step, lane)[0]


class MailboxChannel(DriverChannel):
    """An exchange of a device that nobody sends anything else to."""

    def __init__(
        self, mailbox: MailboxLike, *, generation: int, step: int, check_abort: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(MailboxMessenger(mailbox, check_abort, step), generation, step)
