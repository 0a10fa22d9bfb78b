"""How long a pipeline takes that runs by DeepSpeed's order of instructions, with messages that keep both ends.

Each stage goes through a fixed list (DeepSpeed's `TrainSchedule`): in turn a forward, before it the gradient of the
last backward sent down and the activation received, and a backward, before it the gradient received from above and the
last activation sent up. Sends and receives stand on the device's stream between the computations. A message moves once
both ends have come to it (NCCL: the receiver posts its buffers); the receiver waits for all of it, the sender until
what is left fits into the transport's buffers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """What a micro-batch takes a stage's device, without messages."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class MessageSeconds:
    """What a micro-batch's message takes, in one direction of a cut."""

    wire_s: float
    held_s: float
    """Of those, for how long the sender is kept; 0: the transport's buffers take it whole."""
    taken_s: float
    """What the receiver does with it before it goes on."""


@dataclass(frozen=True, kw_only=True)
class CutSeconds:
    """Messages between two stages."""

    activation: MessageSeconds
    gradient: MessageSeconds


class _Kind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True)
class _Instruction:
    kind: _Kind
    micro_batch: int
    cut: int = -1
    """Of a message: the number of the stage below."""
    is_gradient: bool = False


_End = tuple[int, bool, int, bool]
"""Cut, whether it is a gradient, micro-batch, and whether it is the sender's."""


def pipeline_ends_s(
    stages: Sequence[StageSeconds], cuts: Sequence[CutSeconds], micro_batches: int
) -> tuple[float, ...]:
    """Return when each stage has done its last instruction.

    Args:
        stages: from the first to the last.
        cuts: one less; each lies above the stage of its number.
        micro_batches: of a step.
    """
    runs = [_StageRun(seconds, _instructions(len(stages), micro_batches, at)) for at, seconds in enumerate(stages)]
    posted: dict[_End, float] = {}
    waiting = True
    while waiting:
        waiting = False
        for run in runs:
            waiting = run.go_on(cuts, posted) or waiting
    assert all(run.instruction is None for run in runs), "stages wait for each other"
    return tuple(run.now_s for run in runs)


class _StageRun:
    """A stage on its way through its instructions."""

    def __init__(self, seconds: StageSeconds, instructions: Iterator[_Instruction]) -> None:
        self.now_s = 0.0
        self._seconds = seconds
        self._rest = instructions
        self.instruction = next(instructions, None)

    def go_on(self, cuts: Sequence[CutSeconds], posted: dict[_End, float]) -> bool:
        """Do what can be done before a message whose other end is not there yet; say whether anything was."""
        moved = False
        while (at := self.instruction) is not None:
            if at.kind is _Kind.FORWARD:
                self.now_s += self._seconds.forward_s
            elif at.kind is _Kind.BACKWARD:
                self.now_s += self._seconds.backward_s
            elif not self._meets(at, cuts, posted):
                return moved
            self.instruction = next(self._rest, None)
            moved = True
        return moved

    def _meets(self, at: _Instruction, cuts: Sequence[CutSeconds], posted: dict[_End, float]) -> bool:
        """Take part in a message if its other end has come to it; `posted` says when, by end and message."""
        seconds = cuts[at.cut].gradient if at.is_gradient else cuts[at.cut].activation
        sends = at.kind is _Kind.SEND
        own, other = ((at.cut, at.is_gradient, at.micro_batch, end) for end in (sends, not sends))
        posted.setdefault(own, self.now_s)
        if sends and not seconds.held_s:
            return True
        if other not in posted:
            return False
        begun_s = max(posted[own], posted[other])
        self.now_s = begun_s + (seconds.held_s if sends else seconds.wire_s + seconds.taken_s)
        return True


def _instructions(stages: int, micro_batches: int, stage: int) -> Iterator[_Instruction]:
    """Yield the instructions of a stage: neighbours do opposite things in a step, so that messages meet."""
    before = -1
    for step in range(2 * (micro_batches + stages - 1)):
        forward = step % 2 == stage % 2
        number = (step - stage) // 2 if forward else (step - 2 * stages + stage + 1) // 2
        now, sent = (0 <= one < micro_batches for one in (number, before))
        below, above = stage - 1, stage
        if forward and stage:
            if sent:
                yield _Instruction(_Kind.SEND, before, below, True)
            if now:
                yield _Instruction(_Kind.RECEIVE, number, below, False)
        elif not forward and stage < stages - 1:
            if now:
                yield _Instruction(_Kind.RECEIVE, number, above, True)
            if sent:
                yield _Instruction(_Kind.SEND, before, above, False)
        if now:
            yield _Instruction(_Kind.FORWARD if forward else _Kind.BACKWARD, number)
        before = number
