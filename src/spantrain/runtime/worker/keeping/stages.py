"""Copies of what only one device holds, on devices of other stages, which follow it step by step.

A keeper begins with parameters, optimizer state and running statistics of a stage, which come to it while steps go on
(`runtime.worker.keeping.copying`). After each step the stage's first device sends it the gradients that are summed, and
it does the same update: a third of what AdamW's state and the parameters would take. What is summed before the copy is
whole waits, a few steps of it at most; then the step's end waits. A keeper reports a step at the barrier
(`runtime.coordinator.barrier`) when it has what is summed, and of whom its copy is whole: of whatever is committed,
those keepers have all.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from spantrain.core.job import TrainJob
from spantrain.errors import ProtocolError
from spantrain.runtime.channels import DriverChannel
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.worker.keeping import stage_copy
from spantrain.runtime.worker.keeping.copying import CopyLink, CopyReceiver, CopySender, fetch_from
from spantrain.runtime.worker.plan_part import PlanPart
from spantrain.runtime.worker.switch import Held

_CHUNK_BYTES = 4 * 2**20
_STEPS_BEHIND = 4
"""Whose gradients wait for a copy at most: with AdamW, a little more than the copy itself takes."""


@dataclass(kw_only=True)
class KeptStage(stage_copy.StageCopy):
    """A copy of a stage; its ward is the stage's first device."""

    arriving: CopyReceiver | None = None
    """What it begins with, as long as that has not come."""
    _summed: stage_copy.Summed | None = None
    """Of the step that is under way."""
    _behind: deque[tuple[int, float | None, stage_copy.Summed]] = field(default_factory=deque)
    """Steps that are committed, with their gradients' norm, whose updates it has not done."""

    @property
    def is_whole(self) -> bool:
        """Whether it is what the stage was before the step that is under way."""
        return self.arriving is None

    def go_on(self, job: TrainJob) -> None:
        """Take what has come of what it begins with, and catch up once that is all."""
        if self.arriving is not None and self.arriving.go_on():
            self.arriving = None
            while self._behind:
                self.update(job, *self._behind.popleft())

    def take(self, post: DriverChannel) -> None:
        """Wait for what the ward has summed in a step."""
        pieces = [torch.empty(0, dtype=torch.uint8)]
        while (left := stage_copy.size_of_step(pieces, self.holding) - sum(piece.numel() for piece in pieces)) > 0:
            piece = post.receive(f"kept-gradients:{self.ward}:{len(pieces) - 1}")
            if piece.dtype != torch.uint8 or not 0 < piece.numel() <= _CHUNK_BYTES:
                raise ProtocolError(f"{self.ward}: sent {piece.numel()} of {piece.dtype} as gradients")
            pieces.append(piece)
        if left < 0:
            raise ProtocolError(f"{self.ward}: sent {-left} bytes more than its gradients have")
        self._summed = stage_copy.summed_of(torch.cat(pieces), self.holding, self.ward)

    def commit(self, job: TrainJob, step: int, grad_norm: float | None) -> None:
        """Do the update of the step that is under way, now or when the copy is whole; without a norm there is none."""
        assert self._summed is not None, f"nothing of step {step} has come from {self.ward}"
        self._behind.append((step, grad_norm, self._summed))
        self._summed = None
        if self.is_whole:
            self.update(job, *self._behind.popleft())

    def drop(self) -> None:
        """Forget a step that never happened."""
        self._summed = None


class Keeping:
    """What one device keeps for stages of others under a plan, and what others keep of its own."""

    def __init__(self, here: WorkerContext, part: PlanPart, *, begins: bool, before: "Keeping | None" = None) -> None:
        """Have room for what is kept, until `begin` has it come.

        Args:
            here: this device.
            part: its own part of the plan.
            begins: whether devices begin with new parameters: a keeper makes the same.
            before: under the plan before; of stages that stay what they are, copies that are whole stay.
        """
        self._here, self._part, self._begins = here, part, begins
        # Of each copy: the first device of a stage or of several, their units, the device that keeps it.
        pairs = {(crew.devices[0], crew.units, keeper) for crew in part.plan.crews for keeper in crew.first.keepers}
        self._keepers = sorted(keeper for ward, _, keeper in pairs if ward == here.name)
        old = {(kept.ward, kept.units): kept for kept in before.whole} if before else {}
        own = sorted((ward, units) for ward, units, keeper in pairs if keeper == here.name)
        self._stays = {pair for pair in own if pair in old}
        self.kept: tuple[KeptStage, ...] = tuple(old.get(pair) or self._room_for(*pair) for pair in own)
        self._senders: tuple[CopySender, ...] = ()
        self._waits_at = 0
        """The step at whose end copies are waited for."""

    @property
    def whole(self) -> tuple[KeptStage, ...]:
        """Copies that are whole."""
        return tuple(kept for kept in self.kept if kept.is_whole)

    def begin(self, step: int, held: Sequence[Held] = ()) -> None:
        """Have copies that are new come from before a step on, while it and later ones are under way.

        `held` is what this device had before, in the same step: of that nothing is sent.

        Raises:
            PeerLostError, Interrupted: another device went away, or the run was ended.
        """
        if not self._keepers and not self.kept:
            return
        driver, own = self._part.actions.driver, self._here.name
        assert driver is not None, f"{own} leads no replica, and takes part in keeping"
        self._waits_at = step + _STEPS_BEHIND - 1
        generation = self._part.plan.generation
        if self._begins:
            return
        device = self._here.device
        device.settle(device.torch_device)
        for kept in self.kept:
            link = CopyLink(carrier=driver, generation=generation, ward=kept.ward, keeper=own)
            if (kept.ward, kept.units) in self._stays:
                link.want(())
            else:
                kept.arriving = CopyReceiver(link, kept.holding, kept.optimizer, (self._part, *held))
                kept.go_on(self._here.job)
        links = [CopyLink(carrier=driver, generation=generation, ward=own, keeper=keeper) for keeper in self._keepers]
        holding, optimizer = self._part.holding, self._part.optimizer
        self._senders = tuple(CopySender(link, holding, optimizer, fetch_from(device)) for link in links)
        driver.beside.append(self._go_on)

    def follow(self, step: int) -> None:
        """Send what is summed to those that keep this device's stage, and have it of those whose stages are kept here.

        Raises:
            Interrupted: another device went away, or the run was ended.
            ProtocolError: another device sends something else than it should.
        """
        if not self._keepers and not self.kept:
            return
        self._wait_at(step, lambda: all(sender.is_done for sender in self._senders))
        post = self._part.post(self._here, step, at_end=True)
        if self._keepers:
            flat = stage_copy.bytes_of_step(self._part.holding)
            for keeper in self._keepers:
                for number, piece in enumerate(torch.split(flat, _CHUNK_BYTES)):
                    post.send(keeper, f"kept-gradients:{self._here.name}:{number}", piece)
        for kept in self.kept:
            kept.take(post)
        self._wait_at(step, lambda: all(kept.is_whole for kept in self.kept))

    def before_update(self) -> None:
        """Copy what has still to go: the update of this device's stage is about to be done."""
        for sender in self._senders:
            sender.before_update()

    def commit(self, step: int, grad_norm: float | None) -> None:
        """Do the updates of a step on what is kept here; without a norm there are none."""
        for kept in self.kept:
            kept.commit(self._here.job, step, grad_norm)

    def drop(self) -> None:
        """Forget a step that never happened."""
        for kept in self.kept:
            kept.drop()

    def _room_for(self, ward: str, units: tuple[int, ...]) -> KeptStage:
        plan, graph, job = self._part.plan, self._here.graph, self._here.job
        return KeptStage(**vars(stage_copy.copy_of(plan, graph, job, ward, units, begins=self._begins)))

    def _go_on(self) -> None:
        for sender in self._senders:
            sender.go_on()
        for kept in self.kept:
            kept.go_on(self._here.job)

    def _wait_at(self, step: int, done: Callable[[], bool]) -> None:
        driver = self._part.actions.driver
        if step == self._waits_at and driver is not None:
            driver.wait_until(done)
