"""A device that joins takes its state ahead: it follows the run until that goes over to the plan that it is in."""

from collections.abc import Callable

from torch import Tensor

from spantrain.core.messages import ControlKey
from spantrain.errors import ProtocolError
from spantrain.runtime.control.orders import FollowOrder, KeptState
from spantrain.runtime.control.requests import Done
from spantrain.runtime.step.context import WorkerLinks
from spantrain.runtime.worker.carry_on import LeftState
from spantrain.runtime.worker.keeping.ahead import AheadTaker, link_of
from spantrain.runtime.worker.keeping.stage_copy import copy_of
from spantrain.transport.mailbox.mailbox import MailboxLike

_POLL_S = 0.25


class MailboxCarrier:
    """Messages of a device that has no part in the plan."""

    def __init__(self, mailbox: MailboxLike, check_abort: Callable[[], None]) -> None:
        self._mailbox, self._check_abort = mailbox, check_abort
        self._come: dict[tuple[int, str], tuple[Tensor, ...]] = {}

    def send_message(self, target: str, key: ControlKey, tensors: tuple[Tensor, ...]) -> None:
        """Send to another device."""
        while self.try_send(target, key, tensors) is None:
            self.wait()

    def try_send(self, target: str, key: ControlKey, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Send if there is room; return nothing, or None if there is none."""
        return () if self._mailbox.send(target, key, tensors, timeout_s=0.0) else None

    def try_take(self, step: int, lane: str) -> tuple[Tensor, ...] | None:
        """Return a lane's message of a step, or None if it has not come."""
        return self._come.pop((step, lane), None)

    def wait(self) -> None:
        """Take in what comes, or return after a moment.

        Raises:
            Interrupted: the order is over.
            ProtocolError: samples have come.
        """
        self._check_abort()
        for message in self._mailbox.receive(_POLL_S):
            if not isinstance(message.key, ControlKey):
                raise ProtocolError(f"{message.source} sent {message.key} to a device that has no part in the plan")
            self._come[message.key.step, message.key.lane] = message.tensors


class FollowSession:
    """One follow order on one device."""

    def __init__(self, order: FollowOrder, links: WorkerLinks) -> None:
        """Have room for what is to be taken."""
        self._order = order
        self._carrier = MailboxCarrier(links.mailbox, links.check_abort)
        mine = [copy for copy in order.change.copies if copy.taker == links.name]
        rooms = [(copy.giver, copy_of(order.plan, order.graph, order.job, copy.giver, copy.units)) for copy in mine]
        self._takers = tuple(
            AheadTaker(link_of(order.change, self._carrier, order.plan.generation, giver, links.name), room, (), None)
            for giver, room in rooms
        )

    def run(self) -> Done:
        """Follow until the present plan ends.

        Raises:
            PeerLostError, Interrupted: another device went away, or the order was ended.
            ProtocolError: another device sends something else than it should.
        """
        while not all(taker.is_ended for taker in self._takers):
            self._carrier.wait()
            for taker in self._takers:
                taker.go_on(self._order.job)
        return Done()

    def leave(self, kept: KeptState, first_step: int) -> LeftState | None:  # noqa: ARG002 - as of a train order
        """Return what this device has of the state before a step, if it has come to that."""
        if any(not taker.is_ended or taker.step != first_step for taker in self._takers):
            return None
        return LeftState(part=None, scalars={}, kept=tuple(taker.copy for taker in self._takers))
