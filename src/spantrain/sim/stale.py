"""Steps that overlap, on the virtual clock: the next one begins before the gradients of this one are summed.

The rule is that of `schedule.dispatch.policies`, the machines are those that the runtime drives. What a device does at
the end of a step (sums of gradients, the word of all devices, the update) it does beside its computation, as the
runtime does in a thread of its own, and one step's after the other's. Sums that share a link with samples of the next
step do not slow them down here, nor the other way round.
"""

from spantrain.core.action import Action
from spantrain.core.messages import Arrived, Event, StepStarted
from spantrain.core.plan import Plan
from spantrain.core.speed import SpeedTrace
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.dispatch.machine import DispatchMachine, ReplicaTask
from spantrain.schedule.dispatch.policies import Task, TwoSteps
from spantrain.schedule.registry import make_policy
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import Simulation, SimulationOptions, SimulationResult
from spantrain.sim.replica import SimulatedReplica, World

_BEHIND = 2
"""Steps that are simulated behind those that are shown: with nothing behind it, a step would end sooner."""
STALE_STEPS = 10
"""So many show the pace at which steps follow each other."""


def simulate_stale(
    plan: Plan, costs: StepCosts, *, steps: int = STALE_STEPS, options: SimulationOptions | None = None
) -> SimulationResult:
    """Run a plan with weights one step old; what is returned is of the second half of the steps, in which all overlap.

    Raises:
        ValueError: fewer than four steps; options that steps at once do not have (adapters).
        UsageError, PlanError, ScheduleError: as `sim.engine.simulate`.
    """
    options = options or SimulationOptions()
    if steps < 4:
        raise ValueError(f"steps that overlap show their pace after four of them or more, got {steps}")
    if plan.interleaved:
        raise PlanError(
            "steps do not overlap where stages share devices; plan with --no-interleaving, or leave out --staleness"
        )
    if options.local:
        raise ValueError("steps that overlap have no adapter (`local`); leave it out")
    return _StaleSimulation(plan, costs, options).run(steps)


class _StaleReplica(SimulatedReplica):
    """A replica with two steps open at once."""

    def __init__(
        self,
        devices: tuple[str, ...],
        machines: tuple[DispatchMachine, DispatchMachine],
        simulation: "_StaleSimulation",
        costs: StepCosts,
        speed: SpeedTrace | None,
    ) -> None:
        super().__init__(devices, machines[0], costs.action_s, costs.action_overhead_s, speed=speed)
        self.two_steps = TwoSteps(machines)
        self.ran: list[tuple[int, float, Action]] = []
        """In order: which step's, when it was begun, what."""
        self._simulation = simulation
        self._too_early: dict[int, list[Arrived]] = {}
        """By step: what came before it began here."""

    def begin(self, step: int, world: World) -> None:
        """Open a step; what has arrived for it already is told next."""
        events: list[Event] = [StepStarted(step), *self._too_early.pop(step, ())]
        for event in events:
            self._hear(step, event, world)

    def arrive(self, step: int, event: Arrived, world: World) -> None:
        """Take in samples of a step that is open, or will be."""
        if step in self.two_steps.open_steps:
            self._hear(step, event, world)
        else:
            self._too_early.setdefault(step, []).append(event)

    def _tell(self, event: Event, world: World) -> None:
        assert self._step is not None, f"{event} while nothing runs"
        self._hear(self._step, event, world)

    def _hear(self, step: int, event: Event, world: World) -> None:
        chosen = self.two_steps.on_event(world.clock.now_s, step, event)
        while (done := self.two_steps.close()) is not None:
            self._simulation.closed(self, done)
        if chosen is not None:
            self._step, command = chosen
            self.ran.append((self._step, world.clock.now_s, command.action))
            self._run(command.action, world)


class _StaleSimulation(Simulation):
    sums_overlap = False

    def run(self, steps: int) -> SimulationResult:
        """Run so many steps; return the figures of one of the later ones."""
        self._last = steps - 1 + _BEHIND
        self._actions_s: list[dict[str, tuple[float, float]]] = [{} for _ in range(steps + _BEHIND)]
        """By step and leader: when its last action began and ended."""
        self._updated_s: list[dict[str, float]] = [{} for _ in range(steps + _BEHIND)]
        """By step and leader: when it had updated."""
        self._committed_s: list[float] = []
        for replica in self._by_leader.values():
            for step in (0, 1):
                self._clock.at(0.0, replica.begin, step, self._world)
        self._clock.run()
        if len(self._committed_s) < steps + _BEHIND:
            waits = "; ".join(f"{r.leader} waits {r.two_steps.waiting_for()}" for r in self._stale_replicas)
            raise ScheduleError(f"step {len(self._committed_s)} stopped at {self._clock.now_s:.6g} s: {waits}")
        self._check_links()
        return self._steady(steps)

    def closed(self, replica: SimulatedReplica, step: int) -> None:
        """Note that a replica has done a step's work; when all have, the end of the step takes its course."""
        self._actions_s[step][replica.leader] = (replica.last_start_s, replica.ended_s)
        if len(self._actions_s[step]) == len(self._by_leader):
            self._end_step(step)

    def _end_step(self, step: int) -> None:
        """Sum, commit and update, beside the next step's work; then begin the step after that."""
        before_s = self._updated_s[step - 1] if step else {}
        for replica in self._by_leader.values():
            start_s, ended_s = self._actions_s[step][replica.leader]
            # One step's end follows the other's.
            least_s = before_s.get(replica.leader, 0.0)
            replica.last_start_s, replica.ended_s = max(start_s, least_s), max(ended_s, least_s)
        committed_s = self._commit(step)
        self._committed_s.append(committed_s)
        for leader, replica in self._by_leader.items():
            ready_s = committed_s + self._costs.optimizer_s(leader)
            self._updated_s[step][leader] = ready_s
            if step + 2 <= self._last:
                self._clock.at(ready_s, replica.begin, step + 2, self._world)

    def _replica(self, devices: tuple[str, ...], task: Task) -> SimulatedReplica:
        assert isinstance(task, ReplicaTask), "steps of interleaved pipelines do not overlap"
        machines = (make_policy(self._plan.schedule, task), make_policy(self._plan.schedule, task))
        return _StaleReplica(devices, machines, self, self._costs, self._options.device_speed.get(devices[0]))

    @property
    def _stale_replicas(self) -> list[_StaleReplica]:
        return [replica for replica in self._by_leader.values() if isinstance(replica, _StaleReplica)]

    def _steady(self, steps: int) -> SimulationResult:
        """Return the figures of one step: means over the second half, or over all where steps do the same.

        Steps may go in pairs, one long and one short, so the mean is over an even number.
        """
        last, counted = steps - 1, steps // 4 * 2
        ends_s = self._committed_s[:steps]
        step_s = (ends_s[-1] - ends_s[last - counted]) / counted
        entries = [entry for replica in self._stale_replicas for entry in replica.ran if entry[0] == last]
        ended_s = max(end_s for _, end_s in self._actions_s[last].values())
        pipeline_s = ended_s - min((begun_s for _, begun_s, _ in entries), default=ended_s)
        for replica in self._stale_replicas:
            replica.busy_s /= steps + _BEHIND
            replica.order = [action for step, _, action in replica.ran if step == last]
        self._link_bytes = {pair: size // (steps + _BEHIND) for pair, size in self._link_bytes.items()}
        return self._result(step_s, pipeline_s, tuple(ends_s))
