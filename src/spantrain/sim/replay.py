"""A live run's decisions, made again: by fresh policies, and by one simulated replica on the virtual clock.

Both are given what the live policy was given. Where policies are pure, as they must be, the answers are the same; the
first one that is not is returned, with what stood before it.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from spantrain.core.action import Action
from spantrain.core.messages import Decision, DeviceDecisions, Event, Finished, StepStarted
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.dispatch.policies import Task
from spantrain.schedule.registry import make_machine, replica_tasks
from spantrain.sim.transfers import VirtualClock

_CONTEXT = 3
"""So many decisions before a difference are told with it."""


class Difference(Record):
    """Where a replayed run leaves the live one."""

    device: str
    index: int
    """Number of the decision, counted from the first one in the log."""
    logged: str
    replayed: str
    before: tuple[str, ...] = ()
    """The decisions just before it, on which both agree."""

    def __str__(self) -> str:
        before = "".join(f"\n  agreed: {line}" for line in self.before)
        return f"{self.device}, decision {self.index}:{before}\n  logged: {self.logged}\n  replayed: {self.replayed}"


Compare = Callable[[str, Task, DeviceDecisions], Difference | None]
"""Looks at one device's log under a schedule; `replay` and `simulated_order` are such."""


def compare_all(plan: Plan, logs: Iterable[DeviceDecisions], compare: Compare) -> tuple[Difference, ...]:
    """Compare the logs of several devices by `replay` or `simulated_order`; return the first difference of each.

    Raises:
        PlanError: a log is of a device that the plan does not have.
    """
    tasks = replica_tasks(plan)
    found = []
    for log in logs:
        if log.device not in plan.devices:
            raise PlanError(f"{log.device} is not in the plan, which has {', '.join(plan.devices)}")
        crew = plan.crew_of(log.device)
        task = tasks[plan.crews.index(crew)][crew.replica_index(log.device)]
        found.append(compare(plan.schedule, task, log))
    return tuple(difference for difference in found if difference is not None)


def replay(schedule: str, task: Task, log: DeviceDecisions) -> Difference | None:
    """Tell a fresh policy what the live one heard; return the first answer that differs, None if none does."""
    policy = make_machine(schedule, task)
    for index, decision in enumerate(log.decisions):
        try:
            answer = policy.on_event(decision.now_s, decision.heard)
        except (ScheduleError, ValueError, AssertionError) as error:
            # The live policy took this event; that a fresh one refuses it is a difference, not a failure of replaying.
            return _difference(log, index, f"{decision.event} -> refused: {error}")
        again = Decision.of(decision.step, decision.now_s, decision.heard, answer)
        if again != decision:
            return _difference(log, index, str(again))
    return None


def _difference(log: DeviceDecisions, index: int, replayed: str) -> Difference:
    return Difference(
        device=log.device,
        index=index,
        logged=str(log.decisions[index]),
        replayed=replayed,
        before=tuple(map(str, log.decisions[max(0, index - _CONTEXT) : index])),
    )


def simulated_order(schedule: str, task: Task, log: DeviceDecisions) -> Difference | None:
    """Simulate the replica with the live run's arrival times and durations; return where its order differs first.

    Only what comes from outside is taken from the log: when each step began, when samples arrived, how long an action
    took. Which action runs when follows from the policy and the virtual clock alone.
    """
    steps: dict[int, list[Decision]] = {}
    for decision in log.decisions:
        steps.setdefault(decision.step, []).append(decision)
    for step, decisions in steps.items():
        live = [action for decision in decisions for action in decision.run]
        try:
            again = _ReplayedStep(task, schedule, decisions).run()
        except (ScheduleError, ValueError, AssertionError) as error:
            # The live replica went through this step; that a simulated one cannot is a difference.
            logged = f"step {step}, {len(live)} actions"
            return Difference(device=log.device, index=0, logged=logged, replayed=f"step {step} -> refused: {error}")
        for number, (ours, theirs) in enumerate(zip_longest(again, live)):
            if ours != theirs:
                return Difference(
                    device=log.device,
                    index=number,
                    logged=f"step {step}, action {number}: {theirs or 'none'}",
                    replayed=f"step {step}, action {number}: {ours or 'none'}",
                    before=tuple(map(str, live[max(0, number - _CONTEXT) : number])),
                )
    return None


class _ReplayedStep:
    """One step of one replica on the virtual clock."""

    def __init__(self, task: Task, schedule: str, decisions: Sequence[Decision]) -> None:
        self._policy = make_machine(schedule, task)
        self._clock = VirtualClock()
        self._order: list[Action] = []
        self._seconds = _durations(decisions)
        start_s = decisions[0].now_s
        for decision in decisions:
            event = decision.heard
            if not isinstance(event, Finished):
                # What arrived before the step began here was told with its start.
                self._clock.at(0.0 if isinstance(event, StepStarted) else decision.now_s - start_s, self._tell, event)

    def run(self) -> list[Action]:
        """Return the order in which the actions ran."""
        self._clock.run()
        return self._order

    def _tell(self, event: Event) -> None:
        for command in self._policy.on_event(self._clock.now_s, event):
            action = command.action
            self._order.append(action)
            # An action that the live run never ran has no duration; the orders differ here already.
            end_s = self._clock.now_s + self._seconds.get(action, 0.0)
            self._clock.at(end_s, self._tell, Finished(action), last=True)


def _durations(decisions: Sequence[Decision]) -> dict[Action, float]:
    """Return the seconds from an action's command to its end, as the live policy was told of both."""
    begun: dict[Action, float] = {}
    seconds: dict[Action, float] = {}
    for decision in decisions:
        event = decision.heard
        if isinstance(event, Finished) and event.action in begun:
            seconds[event.action] = decision.now_s - begun[event.action]
        begun.update(dict.fromkeys(decision.run, decision.now_s))
    return seconds
