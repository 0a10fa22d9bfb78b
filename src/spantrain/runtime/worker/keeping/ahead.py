"""State goes ahead of a change of plan, while steps go on: what is then left of the change is a barrier.

Who is to have units of another's copies them beside the steps (`runtime.worker.keeping.copying`); what the giver sums
in steps meanwhile comes behind, in the order of steps, each with the norm that its update takes. Nobody waits for it,
and it counts for nothing before the change: there both sides come to the same step, and the taker goes on with it.
As a virtual machine is moved while it runs, where what has changed is what is summed. A device that joins follows the
run so until that goes over to the plan that it is in.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from spantrain.core.job import TrainJob
from spantrain.core.records import Record
from spantrain.errors import ProtocolError
from spantrain.models.statistics import named_statistics
from spantrain.models.units import parameter_names
from spantrain.runtime.channels import MailboxMessages, MailboxMessenger
from spantrain.runtime.checkpoint.holding import Holding, first_names, held_tensors
from spantrain.runtime.control.orders import FollowOrder, KeptState
from spantrain.runtime.control.requests import AheadChange, AheadState, Done
from spantrain.runtime.step.context import WorkerContext, WorkerLinks
from spantrain.runtime.words import packed_words, read_words
from spantrain.runtime.worker.carry_on import LeftState
from spantrain.runtime.worker.keeping import copying, stage_copy
from spantrain.runtime.worker.keeping.copying import CopyLink, CopyReceiver, CopySender, Fetch, fetch_from
from spantrain.runtime.worker.keeping.stage_copy import copy_of
from spantrain.runtime.worker.plan_part import PlanPart
from spantrain.runtime.worker.switch import Held

_LEAST_BYTES, _MOST_WAITING = 2**20, 2
"""What may wait of steps that are summed: so many bytes, or so many times what is copied."""
_URGENCY = (AheadState.FULL, AheadState.COPYING, AheadState.LEVEL)


def link_of(change: AheadChange, carrier: MailboxMessages, generation: int, giver: str, taker: str) -> CopyLink:
    """Return how two devices exchange what goes ahead of a change."""
    what = f"ahead-{change.number}"
    return CopyLink(carrier=carrier, generation=generation, ward=giver, keeper=taker, what=what)


class _StepWords(Record):
    """What comes before the bytes of a step, or ends them all."""

    step: int
    grad_norm: float | None = None
    size_bytes: int = 0
    ends: bool = False


class AheadGiver:
    """Gives one device what it takes ahead."""

    def __init__(self, link: CopyLink, holding: Holding, optimizer: torch.optim.Optimizer, fetch: Fetch) -> None:
        """`holding`: of the units alone."""
        self._link, self._holding = link, holding
        self._copy = CopySender(link, holding, optimizer, fetch)
        self._waiting: deque[Tensor] = deque()
        """Pieces of steps that have not gone: of each its words, then its bytes."""
        self._given = 0
        """Pieces that have gone behind the copy."""
        held_bytes = sum(tensor.nbytes for tensor, _ in held_tensors(holding, optimizer, holding.parts).values())
        self._most_bytes = max(_LEAST_BYTES, _MOST_WAITING * held_bytes)

    @property
    def state(self) -> AheadState:
        """How far this is."""
        if self._copy.is_done and not self._waiting:
            return AheadState.LEVEL
        waiting_bytes = sum(piece.numel() for piece in self._waiting)
        return AheadState.FULL if waiting_bytes > self._most_bytes else AheadState.COPYING

    def go_on(self) -> None:
        """Send as much as there is room for.

        Raises:
            ProtocolError: the taker sends something else than it should.
        """
        self._copy.go_on()
        while self._copy.is_done and self._waiting:
            if not self._link.give(self._copy.given + self._given, self._waiting[0]):
                return
            self._waiting.popleft()
            self._given += 1

    def before_update(self, step: int, grad_norm: float | None) -> None:
        """Take what is summed in a step, whose update is about to be done; without a norm there is none."""
        self._copy.before_update()
        flat = stage_copy.bytes_of_step(self._holding)
        self._waiting.append(packed_words(_StepWords(step=step, grad_norm=grad_norm, size_bytes=flat.numel())))
        self._waiting.extend(piece for piece in torch.split(flat, copying.PIECE_BYTES) if piece.numel())

    def end(self, step: int) -> None:
        """Have the taker know that this is the step with which it goes on."""
        self._waiting.append(packed_words(_StepWords(step=step, ends=True)))


class AheadTaker:
    """Takes units of another device ahead."""

    def __init__(self, link: CopyLink, copy: stage_copy.StageCopy, held: Sequence[Held], step: int | None) -> None:
        """Ask for what is lacking.

        Args:
            link: to the giver.
            copy: room for it.
            held: what this device has before the same step, in which the copy begins.
            step: that one; None: whichever the giver's first one is.
        """
        self._link, self.copy = link, copy
        self.step = step
        """Before which the copy is what the giver has, once it is whole."""
        self.is_ended = False
        """Whether it is the step with which it goes on."""
        self._arriving = CopyReceiver(link, copy.holding, copy.optimizer, held)
        self._most_bytes = stage_copy.most_bytes_of_step(copy.holding)
        self._taken = 0
        """Pieces that have come behind the copy."""
        self._words: _StepWords | None = None
        """Of the step that comes now."""
        self._come: list[Tensor] = []

    def go_on(self, job: TrainJob) -> None:
        """Take what has come, and do the updates.

        Raises:
            ProtocolError: something else has come.
        """
        if not self._arriving.go_on():
            return
        while not self.is_ended and (piece := self._link.take(self._arriving.taken + self._taken)) is not None:
            self._taken += 1
            if self._words is None:
                self._words = self._begun(read_words(_StepWords, piece, self._link.ward, "says which step comes ahead"))
            else:
                self._come.append(piece)
            self._end_step(job)

    def _begun(self, words: _StepWords) -> _StepWords:
        awaited = words.step if self.step is None else self.step
        if words.step != awaited or not 0 <= words.size_bytes <= self._most_bytes:
            raise ProtocolError(
                f"{self._link.ward}: sends {words.size_bytes} bytes of step {words.step} ahead, awaited are "
                f"{self._most_bytes} at most of step {awaited}"
            )
        self.step, self.is_ended = awaited, words.ends
        return words

    def _end_step(self, job: TrainJob) -> None:
        words = self._words
        come = sum(piece.numel() for piece in self._come)
        if words is None or words.ends or come < words.size_bytes:
            return
        if come > words.size_bytes:
            raise ProtocolError(f"{self._link.ward}: sent {come} bytes of a step of {words.size_bytes}")
        flat = torch.cat(self._come) if self._come else torch.empty(0, dtype=torch.uint8)
        summed = stage_copy.summed_of(flat, self.copy.holding, self._link.ward)
        self.copy.update(job, words.step, words.grad_norm, summed)
        self._words, self._come, self.step = None, [], words.step + 1


class StateAhead:
    """What one device of the present plan gives and takes ahead of the next one."""

    def __init__(self, here: WorkerContext, part: PlanPart) -> None:
        """Nothing, until there is a change to come."""
        self._here, self._part = here, part
        self._givers: list[AheadGiver] = []
        self._takers: list[AheadTaker] = []

    def begin(self, change: AheadChange, held: Sequence[Held], step: int) -> None:
        """Begin with a change in the place of what there was, before a step; `held`: what this device has then."""
        self._givers, self._takers = [], []
        driver, own = self._part.actions.driver, self._here.name
        mine = [copy for copy in change.copies if own in (copy.giver, copy.taker)]
        if not mine:
            return
        assert driver is not None, f"{own} leads no replica, and is to give or take something ahead"
        if self.go_on not in driver.beside:
            driver.beside.append(self.go_on)
        plan, device = self._part.plan, self._here.device
        device.settle(device.torch_device)
        for copy in mine:
            link = link_of(change, driver, plan.generation, copy.giver, copy.taker)
            if own == copy.giver:
                holding = self._part.holding.of(self._names(copy.units))
                self._givers.append(AheadGiver(link, holding, self._part.optimizer, fetch_from(device)))
            else:
                room = stage_copy.copy_of(plan, self._here.graph, self._here.job, copy.giver, copy.units)
                self._takers.append(AheadTaker(link, room, held, step))

    @property
    def state(self) -> AheadState | None:
        """How far what is given is, all of it; None: nothing is given."""
        return min((giver.state for giver in self._givers), key=_URGENCY.index, default=None)

    def go_on(self) -> None:
        """Send and take a little, between actions."""
        for giver in self._givers:
            giver.go_on()
        for taker in self._takers:
            taker.go_on(self._here.job)

    def before_update(self, step: int, grad_norm: float | None) -> None:
        """Take what goes ahead of a step whose update is about to be done."""
        for giver in self._givers:
            giver.before_update(step, grad_norm)

    def finish(self, step: int) -> None:
        """Come to the step with which the next plan begins; all who give and take do so at once.

        Raises:
            Interrupted: another device went away, or the run was ended.
        """
        driver = self._part.actions.driver
        if driver is None or not (self._givers or self._takers):
            return
        for giver in self._givers:
            giver.end(step)
        driver.wait_until(
            lambda: self.state in (None, AheadState.LEVEL) and all(taker.is_ended for taker in self._takers)
        )

    def taken(self, step: int) -> tuple[Held, ...]:
        """Return what was taken of the state before a step, if all of it has come."""
        return tuple(taker.copy for taker in self._takers if taker.is_ended and taker.step == step)

    def _names(self, units: Sequence[int]) -> set[str]:
        """Return the names of what units of this device hold, as the unsplit model has them."""
        member, plan = self._part.member, self._part.plan
        by_unit = dict(zip(plan.crew_of(self._here.name).units, member.units, strict=True))
        chosen, first = [by_unit[unit] for unit in units], first_names(plan.model, self._here.graph)
        names = {name for unit in chosen for name in parameter_names(unit).values()}
        return {first.get(name, name) for name in names} | named_statistics(chosen).keys()


class FollowSession:
    """One follow order on one device."""

    def __init__(self, order: FollowOrder, links: WorkerLinks) -> None:
        """Have room for what is to be taken."""
        self._order = order
        self._carrier = MailboxMessenger(links.mailbox, links.check_abort)
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
