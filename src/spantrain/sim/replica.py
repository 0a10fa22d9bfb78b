"""One simulated replica: its policy, what it runs and holds."""

from collections.abc import Callable
from dataclasses import dataclass

from spantrain.core.action import Action, Op
from spantrain.core.messages import Arrived, Event, Finished, StepStarted
from spantrain.policy.dispatch import DispatchPolicy
from spantrain.sim.clock import VirtualClock
from spantrain.sim.record import TraceRecorder

__all__ = ["SimulatedReplica", "World"]

_RELEASES = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, kw_only=True)
class World:
    """What replicas share."""

    clock: VirtualClock
    recorder: TraceRecorder
    deliver: Callable[[str, Action, int], None]
    """Takes what a device's action has produced in a step to those who need it."""


class SimulatedReplica:
    """Gives events to a policy and lets the actions that it commands take their time.

    Counts held samples by itself, so that a policy which breaks its limit is seen.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        policy: DispatchPolicy,
        seconds: Callable[[str, Action], float],
        overhead_s: float,
    ) -> None:
        self.devices = devices
        self.policy = policy
        self.order: list[Action] = []
        """What it ran in the last step."""
        self.busy_s = 0.0
        """In the last step."""
        self.ended_s = 0.0
        """When its last action ended."""
        self.peak_held = 0
        self._held = 0
        self._seconds = seconds
        self._overhead_s = overhead_s
        self._step: int | None = None
        self._early: list[Arrived] = []

    @property
    def leader(self) -> str:
        """The device that decides."""
        return self.devices[0]

    def begin(self, step: int, world: World) -> None:
        """Start a step; what has arrived for it already is told next."""
        self._step = step
        self.order, self.busy_s = [], 0.0
        early, self._early = self._early, []
        events: list[Event] = [StepStarted(step), *early]
        for event in events:
            self._tell(event, world)

    def end(self) -> None:
        """Close the step; what arrives from now on belongs to the next one."""
        self._step = None

    def arrive(self, event: Arrived, world: World) -> None:
        """Take in samples of this step, or of the next one."""
        if self._step is None:
            self._early.append(event)
        else:
            self._tell(event, world)

    def _tell(self, event: Event, world: World) -> None:
        for command in self.policy.on_event(world.clock.now_s, event):
            self._run(command.action, world)

    def _run(self, action: Action, world: World) -> None:
        start_s = world.clock.now_s + self._overhead_s
        end_s = start_s + self._seconds(self.leader, action)
        if action.op is Op.FORWARD:
            self._held += action.span.size
            self.peak_held = max(self.peak_held, self._held)
        self.order.append(action)
        world.clock.at(end_s, lambda: self._finished(action, start_s, world), last=True)

    def _finished(self, action: Action, start_s: float, world: World) -> None:
        assert self._step is not None
        self.ended_s = world.clock.now_s
        self.busy_s += self.ended_s - start_s
        world.recorder.computed(self.devices, action, self._step, start_s, self.ended_s)
        if action.op in _RELEASES:
            self._held -= action.span.size
        world.deliver(self.leader, action, self._step)
        self._tell(Finished(action), world)
