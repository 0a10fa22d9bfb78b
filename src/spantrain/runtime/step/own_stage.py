"""A stage as its device's driver knows it: its work, its samples, its lanes, and when its gradients are final."""

from collections.abc import Callable, Iterable
from functools import partial

from spantrain.core.action import Action, Direction, Op
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.formats.registry import WireFormat
from spantrain.models.execution.stage import NamesFinal
from spantrain.runtime.step.work import DeviceClock, Lane, ReplicaWork

EVALUATE = "evaluate"
"""The lane of held-out samples."""


class StageWork(Record):
    """A stage's computation, and what its actions take on the device."""

    work: ReplicaWork
    clock: DeviceClock


class OwnStage:
    """One of the driver's stages: its work, its samples, and where its messages come in."""

    def __init__(self, plan: Plan, number: int, replica: int, work: StageWork) -> None:
        stage = plan.stages[number]
        self.work, self.clock = work.work, work.clock
        self.spans = stage.replica_spans(replica)
        self.last_backward = LastBackward(sum(span.size for span in self.spans))
        self.wire_before = plan.stages[number - 1].wire_format if number else WireFormat.NATIVE
        self.wire_behind = stage.wire_format
        before, behind = stage.first_unit - 1, stage.end_unit - 1
        self._cuts = {Direction.FORWARD.value: before, EVALUATE: before, Direction.BACKWARD.value: behind}

    def lane(self, name: str) -> Lane:
        """Return where messages of a lane for this stage lie."""
        return name, self._cuts[name]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All of them."""
        return tuple(self._cuts.items())


class SharedNames:
    """Parameters that several stages of a device share, which are final when all of those have told of them in a step.

    Of each the name in the first stage is told.
    """

    def __init__(self, stages: Iterable[OwnStage]) -> None:
        """Find them, by rising stage."""
        names: dict[int, list[str]] = {}
        for own in stages:
            for name, parameter in own.work.executor.named_parameters().items():
                names.setdefault(id(parameter), []).append(name)
        shared = [found for found in names.values() if len(found) > 1]
        self._first = {name: found[0] for found in shared for name in found}
        self._stages = {found[0]: len(found) for found in shared}

    def told(self, final: NamesFinal | None) -> Callable[[int], NamesFinal | None]:
        """Return, by stage, whom it tells in a step that tells `final`; it may do so more than once."""
        if final is None or not self._stages:
            return lambda _stage: final
        heard = {name: set[int]() for name in self._stages}

        def hear(stage: int, names: Iterable[str]) -> None:
            done = []
            for name in (self._first.get(own, own) for own in names):
                if name in heard:
                    heard[name].add(stage)
                if name not in heard or len(heard[name]) >= self._stages[name]:
                    done.append(name)
            final(done)

        return lambda stage: partial(hear, stage)


class LastBackward:
    """Knows the action behind which no sample of a step waits for a backward here, however the step is cut."""

    def __init__(self, samples: int) -> None:
        """Expect so many samples in each step."""
        self._samples = samples
        self._left: dict[int, int] = {}
        self._final: dict[int, NamesFinal] = {}

    def begin(self, step: int, final: NamesFinal | None) -> None:
        """Begin a step, whose last backward tells `final` which gradients are done; None: nobody asks."""
        if final is not None:
            self._left[step], self._final[step] = self._samples, final

    def of(self, step: int, action: Action) -> NamesFinal | None:
        """Return whom an action that begins now tells; None: it is not the step's last backward."""
        if step not in self._left or action.op not in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            return None
        self._left[step] -= action.span.size
        if self._left[step]:
            return None
        del self._left[step]
        return self._final.pop(step)
