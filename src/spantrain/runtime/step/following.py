"""How the members of a tensor-parallel replica do the same in the same order: its leader tells, the others follow.

Collectives need one order, and only the leader hears from other stages and asks the policy. Before each action it tells
the followers `(op, span)` and hands round what came from other stages. Samples and labels every member reads itself.

What is told is a row of numbers, of fixed length so that nobody need know what comes:

    instruction, step, span.lo, span.hi, number of tensors, then for each: dtype, dimensions, shape
"""

import time
from collections.abc import Sequence
from enum import IntEnum
from functools import partial

import torch

from spantrain.core.action import Action, Op
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.devices.base import Tensors
from spantrain.errors import WorkerError
from spantrain.formats.codec import DTYPE_BYTES
from spantrain.models.execution.stage import NamesFinal
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.step.own_stage import LastBackward
from spantrain.runtime.step.work import DeviceClock, Feed, ReplicaWork

_ROW = 256
_KEEP_ALIVE_S = 1.0
"""How often an idle leader says so: collectives give up on one who says nothing."""
_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in DTYPE_BYTES)

Layout = tuple[torch.dtype, tuple[int, ...]]


class _Instruction(IntEnum):
    END = 0
    WAIT = 1
    FORWARD = 2
    BACKWARD = 3
    BACKWARD_INPUT = 4
    BACKWARD_WEIGHT = 5
    EVALUATE = 6


_OPS = {op: _Instruction[op.name] for op in Op}
_OP_OF = {instruction: op for op, instruction in _OPS.items()}


class Followers:
    """The other members of a replica, as its leader sees them; of a device alone there are none."""

    def __init__(self, group: MemberGroup, torch_device: torch.device) -> None:
        self._group = group
        self._torch_device = torch_device
        self._listening = False
        self._told_s = 0.0

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return self._group.size > 1

    def begin(self) -> None:
        """From now on they wait to be told."""
        self._listening = self.exist
        self._told_s = time.monotonic()

    def end(self) -> None:
        """Let them go on with what comes after the actions."""
        if self._listening:
            self._announce(_Instruction.END)
        self._listening = False

    def keep_alive(self) -> None:
        """Tell those who wait that there is nothing to do yet, now and then."""
        if self._listening and time.monotonic() - self._told_s > _KEEP_ALIVE_S:
            self._announce(_Instruction.WAIT)

    def tell(self, op: Op | None, step: int, span: Span, tensors: Tensors) -> Tensors:
        """Have them run an action (None: a held-out forward pass) on these tensors; return them, on the device."""
        if not self.exist:
            return tensors
        instruction = _Instruction.EVALUATE if op is None else _OPS[op]
        handed = tuple(tensor.to(self._torch_device).contiguous() for tensor in tensors)
        self._announce(instruction, step, span, handed)
        for tensor in handed:
            self._group.broadcast(tensor)
        return handed

    def _announce(
        self, instruction: _Instruction, step: int = 0, span: Span | None = None, tensors: Tensors = ()
    ) -> None:
        lo, hi = (span.lo, span.hi) if span else (0, 0)
        numbers = [int(instruction), step, lo, hi, len(tensors)]
        for tensor in tensors:
            numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        if len(numbers) > _ROW:
            raise WorkerError(
                f"{len(tensors)} tensors cross the cut before this stage, more than a tensor-parallel replica can be "
                "told of at once; cut the model elsewhere, or give this stage replicas of one device"
            )
        self._group.announce(torch.tensor(numbers + [0] * (_ROW - len(numbers)), dtype=torch.int64))
        self._told_s = time.monotonic()


class Follower:
    """A member of a replica that does what its leader does."""

    def __init__(
        self, here: WorkerContext, plan: Plan, *, group: MemberGroup, work: ReplicaWork, clock: DeviceClock
    ) -> None:
        """Follow the leader of a group in a plan."""
        self._here = here
        self._group = group
        self._work = work
        self._clock = clock
        crew = plan.crew_of(here.name)
        self._stage = crew.numbers[0]
        self._last_backward = LastBackward(crew.first.samples_of(crew.replica_index(here.name)))

    def run_step(self, step: int, final: NamesFinal | None = None) -> None:
        """Do what the leader tells until it says that the step's actions are done; `final` as of `StepDriver`."""
        self._last_backward.begin(step, final)
        self._follow(self._work.feed)

    def evaluate(self, feed: Feed) -> None:
        """Do the same for a held-out batch."""
        self._follow(feed)

    def _follow(self, feed: Feed) -> None:
        while True:
            instruction, step, (lo, hi), layouts = self._listen()
            self._here.check_abort()
            if instruction is _Instruction.END:
                return
            if instruction is _Instruction.EVALUATE:
                evaluate = partial(self._evaluate, step, Span(lo, hi), layouts, feed)
                self._clock.run(Op.FORWARD, hi - lo, evaluate)
            elif instruction is not _Instruction.WAIT:
                self._perform(_OP_OF[instruction], step, Span(lo, hi), layouts)

    def _perform(self, op: Op, step: int, span: Span, layouts: Sequence[Layout]) -> None:
        action = Action(self._stage, op, span)
        final = self._last_backward.of(step, action)

        def work() -> Tensors:
            return self._work.bind(op, step, span, self._take(layouts), self._clock.told_by_work(final))()

        start_s = time.monotonic()
        self._clock.run(op, span.size, work, final)
        held = self._work.executor.held_samples
        self._here.recorder.computed(str(action), step, start_s, time.monotonic(), held_samples=held)

    def _evaluate(self, step: int, span: Span, layouts: Sequence[Layout], feed: Feed) -> Tensors:
        return self._work.bind_evaluation(step, span, self._take(layouts), feed)()

    def _listen(self) -> tuple[_Instruction, int, tuple[int, int], list[Layout]]:
        """Return what is told: the instruction, the step, the samples, and the types and shapes of tensors."""
        row = torch.zeros(_ROW, dtype=torch.int64)
        self._group.announce(row)
        numbers: list[int] = row.tolist()
        instruction, step, lo, hi, count = numbers[:5]
        layouts, at = list[Layout](), 5
        for _ in range(count):
            dtype, dims = numbers[at : at + 2]
            layouts.append((_DTYPES[dtype], tuple(numbers[at + 2 : at + 2 + dims])))
            at += 2 + dims
        return _Instruction(instruction), step, (lo, hi), layouts

    def _take(self, layouts: Sequence[Layout]) -> Tensors:
        """Receive what the leader hands round."""
        device = self._clock.device.torch_device
        found = tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in layouts)
        for tensor in found:
            self._group.broadcast(tensor)
        return found
