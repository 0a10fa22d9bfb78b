"""A stage as its device's driver knows it: its work, its samples, its lanes, and when its gradients are final."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spantrain.core.action import Action, Direction, Op
from spantrain.core.plan import Plan
from spantrain.formats.registry import WireFormat
from spantrain.models.execution.stage import NamesFinal
from spantrain.runtime.step.work import DeviceClock, Lane, ReplicaWork

EVALUATE = "evaluate"
"""The lane of held-out samples."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
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


class FinalOfSeveral:
    """Tells of parameters that several stages of a device share when the last of those has told of them."""

    def __init__(self, final: NamesFinal, shared: Mapping[str, int]) -> None:
        """`shared`: of how many stages each such parameter is."""
        self._final, self._left = final, dict(shared)

    def __call__(self, names: Iterable[str]) -> None:
        """Hear of parameters that a stage adds nothing more to in this step."""
        told = []
        for name in names:
            if name in self._left:
                self._left[name] -= 1
            if not self._left.get(name):
                told.append(name)
        self._final(told)


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


def shared_names(stages: Iterable[OwnStage]) -> dict[str, int]:
    """Return of parameters that several stages of a device share, of how many."""
    names = Counter(name for own in stages for unit in own.work.executor.names_by_unit for name in unit)
    return {name: count for name, count in names.items() if count > 1}
