"""Two ways to carry an exchange's messages: through a driver, which others may send to already, or a bare mailbox."""

from collections.abc import Callable

import torch

from spantrain.core.messages import MessageKey
from spantrain.core.span import Span
from spantrain.errors import ProtocolError
from spantrain.runtime.gradients.stage_sums import Messenger
from spantrain.transport.mailbox.mailbox import MailboxLike

_POLL_S = 0.25


class DriverChannel:
    """Of a device whose driver hears from other stages: what is none of the exchange's is kept for the first step."""

    def __init__(self, driver: Messenger, *, generation: int, step: int) -> None:
        self._driver = driver
        self._generation = generation
        self._step = step

    def send(self, target: str, lane: str, tensor: torch.Tensor) -> None:
        """Send a tensor; takes in what comes while there is no room."""
        self._driver.send_message(target, MessageKey(self._generation, self._step, lane, 0, Span(0, 1)), (tensor,))

    def receive(self, lane: str) -> torch.Tensor:
        """Wait for the tensor of a lane."""
        return self._driver.wait_for_message(self._step, lane)[0]


class MailboxChannel:
    """Of a device that nobody sends anything else to."""

    def __init__(
        self, mailbox: MailboxLike, *, generation: int, step: int, check_abort: Callable[[], None] = lambda: None
    ) -> None:
        self._mailbox = mailbox
        self._generation = generation
        self._step = step
        self._check_abort = check_abort
        self._arrived: dict[str, torch.Tensor] = {}

    def send(self, target: str, lane: str, tensor: torch.Tensor) -> None:
        """Send a tensor; takes in what comes while there is no room."""
        key = MessageKey(self._generation, self._step, lane, 0, Span(0, 1))
        while not self._mailbox.send(target, key, (tensor,), timeout_s=0.0):
            self._take_in()

    def receive(self, lane: str) -> torch.Tensor:
        """Wait for the tensor of a lane."""
        while lane not in self._arrived:
            self._take_in()
        return self._arrived.pop(lane)

    def _take_in(self) -> None:
        self._check_abort()
        for message in self._mailbox.receive(_POLL_S):
            if message.key.step != self._step or len(message.tensors) != 1:
                what = f"{message.key} with {len(message.tensors)} tensors"
                raise ProtocolError(f"{message.source} sent {what} in the middle of an exchange of step {self._step}")
            self._arrived[message.key.lane] = message.tensors[0]
