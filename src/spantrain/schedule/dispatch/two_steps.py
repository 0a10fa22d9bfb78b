"""What a replica does next while two steps are at work: the older one's work first, the next one's into the holes.

The rule is a uniform delay of one: step t works on weights V_t throughout, V_0 = V_1 are the first weights, and
V_{t+2} = update(V_{t+1}, gradients of step t). So step t + 1 never waits for the update from step t, and step t + 2
begins on a device when it has that update. (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021,
section 3.1, PipeDream-2BW: kept: two versions of weights, gradients one update late for every sample and stage. Not
kept: its 1F1B order without an end of the step; here any schedule runs its steps whole, and the next one fills in.)
"""

from collections.abc import Iterable

from spantrain.core.messages import Command, Event, Finished, StepStarted
from spantrain.errors import ScheduleError
from spantrain.schedule.dispatch.machine import Machine


class TwoSteps:
    """Two decision machines of one replica, one for each step that is open, under one in-flight limit.

    The older step never waits for the next one: a forward of the next one must leave room for all samples that the
    older one holds, or has yet to forward. So steps end one after another as they would alone, and no limit that lets
    one step run stops two.
    """

    def __init__(self, machines: Iterable[Machine]) -> None:
        """Take two machines of the same task."""
        self._free = list(machines)
        self._open: dict[int, Machine] = {}
        """By rising step."""
        self._is_running = False
        assert len(self._free) == 2, "two steps need two machines"

    def on_event(self, now_s: float, step: int, event: Event) -> tuple[int, Command] | None:
        """Take in what happened in a step; return what to do, and in which step.

        Raises:
            ScheduleError: the step is not open, or it begins while two others are.
        """
        if isinstance(event, StepStarted):
            self._open_step(step)
        machine = self._open.get(step)
        if machine is None:
            raise ScheduleError(f"{event} is of step {step}, open are {list(self._open)}")
        machine.hear(now_s, event)
        if isinstance(event, Finished):
            self._is_running = False
        return None if self._is_running else self._decide(now_s)

    def close(self) -> int | None:
        """Take leave of the oldest open step if all its work is done; return it."""
        step = next(iter(self._open), None)
        if step is None or not self._open[step].step_complete:
            return None
        machine = self._open.pop(step)
        machine.held_before = 0
        self._free.append(machine)
        return step

    @property
    def open_steps(self) -> tuple[int, ...]:
        """The steps that have begun and were not closed, by rising number."""
        return tuple(self._open)

    def waiting_for(self) -> str:
        """Say in a few words what an idle replica waits for."""
        return "; ".join(f"in step {step} for {machine.waiting_for()}" for step, machine in self._open.items())

    def _open_step(self, step: int) -> None:
        if not self._free or any(step != other + 1 for other in self._open):
            raise ScheduleError(f"step {step} begins while {list(self._open)} are open")
        self._open[step] = self._free.pop()

    def _decide(self, now_s: float) -> tuple[int, Command] | None:
        held_before = 0
        for step, machine in self._open.items():
            machine.held_before = held_before
            for command in machine.decide(now_s):
                self._is_running = True
                return step, command
            held_before += machine.unreleased
        return None
