"""Devices that join a run while it trains, or leave it: a plan for those that are then there is made beside it.

So is one behind a loss, or when a device has left: the light change came at once, and the planner may know better.

Asteroid and Sailor stop for it, Sailor for 11 s; here steps go on while the planner works, and state moves from memory
to memory where devices change what they hold, ahead of the change where that takes a while (`ahead`). A device that
joins is taken in behind a step if steps get shorter; one that leaves goes when others have what it held.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from spantrain.app.live_requests import DRAIN, taken
from spantrain.app.planning.ahead import MovesAhead, ahead_of
from spantrain.app.planning.protection import protected_step_s
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session
from spantrain.app.training.recovery.carry_on import Leg, givers_of
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.core.names import few
from spantrain.core.plan import Plan
from spantrain.core.quantities import format_bytes, format_seconds
from spantrain.cost.moving import moved
from spantrain.errors import SpanTrainError
from spantrain.planner.present import NewPlan, full_plan
from spantrain.recovery.policy import is_worth
from spantrain.runtime.control.orders import FollowOrder, KeptState
from spantrain.runtime.control.requests import AheadChange
from spantrain.runtime.coordinator.barrier import CommitPoint, StepBarrier
from spantrain.runtime.coordinator.roster import DeviceLostError

_LEAVE_S = 8.0
"""How long state may go ahead of a device that wants to leave: whose machine is taken away has little time."""


class Membership:
    """Looks for devices that have come, or want to leave. Not for several threads at once."""

    def __init__(
        self, leg: Leg, session: Session, request: TrainRequest, reporter: Reporter, stop: StopRequest
    ) -> None:
        self._leg, self._session, self._request, self._reporter, self._stop = leg, session, request, reporter, stop
        considered = frozenset(session.devices) if leg.considered is None else leg.considered
        self._known = considered | frozenset(leg.plan.devices)
        """Devices that the present plan was made with in mind."""
        self._thread: threading.Thread | None = None
        self._found: NewPlan | None = None
        self._reason = ""
        self._ahead: MovesAhead | None = None
        """What goes ahead of the plan that was found."""
        self._planned_under = 0
        """The generation of the plan that ran then."""
        self._until_s: float | None = None
        """By when it is to be there, by the monotonic clock; None: it has not begun."""
        self._changes = 0
        """How often something has gone ahead."""
        self._goes = False
        self._going: frozenset[str] = frozenset()
        """Devices that want to leave, and were thought of."""
        self._is_light = leg.is_light

    @property
    def ready(self) -> bool:
        """Whether the run is to go over to another plan at once; in any thread."""
        return self._goes

    def look(self, barrier: StepBarrier) -> None:
        """Have a plan made if somebody has come or wants to leave (or is to, by files), beside the one that runs.

        Once there is one, what it moves goes ahead, where that is worth the while.
        """
        if self._stop.wanted:
            return  # all end behind this step
        coordinator, plan = self._session.coordinator, barrier.plan
        for device in taken(self._request.out, DRAIN):
            if not coordinator.ask_to_leave(device, "asked to by spantrain drain"):
                self._tell(f"spantrain drain: there is no device {device} in this run now")
        leaving = coordinator.leaving()
        idle = [name for name in leaving if name not in plan.devices and name not in self._leg.leaving]
        for name in idle:
            self._tell(f"{name} left ({leaving[name]}): it had no part in the run")
        coordinator.dismiss(idle)
        self._known -= {*idle}
        if self._ahead is not None and frozenset(leaving) & {*plan.devices} - self._going:
            self._drop(barrier)  # who leaves has no time
        if self._found is not None:
            self._look_ahead(barrier)
        if self._found is not None or (self._thread is not None and self._thread.is_alive()):
            return
        here = frozenset(coordinator.here())
        new, going = here - self._known, frozenset(leaving) & frozenset(plan.devices)
        for name in sorted(self._known - here - {*plan.devices, *leaving}):
            self._tell(f"{name} is gone: it stood by, and had no part in the run")
        self._known &= here | frozenset(plan.devices)
        if going - self._going or (going and new):
            self._going, self._known = going, self._known | here
            self._plan_in_background(barrier, self._do_without, plan, here, {name: leaving[name] for name in going})
        elif new:
            self._known |= here
            self._is_light = False
            self._plan_in_background(barrier, self._consider, plan, here, new)
        elif self._is_light:
            self._is_light = False
            self._plan_in_background(barrier, self._improve, plan, here)

    def _tell(self, text: str) -> None:
        """Have people told of what changes nothing; in any thread."""
        self._session.coordinator.later(lambda: self._reporter.note(text))

    def _plan_in_background(self, barrier: StepBarrier, work: Callable[..., None], *arguments: object) -> None:
        def plan() -> None:
            work(*arguments)
            if self._ahead is not None:
                self._session.coordinator.later(lambda: self._look_ahead(barrier))

        self._thread = threading.Thread(target=plan, name="planner", daemon=True)
        self._thread.start()

    def leg(self, committed: CommitPoint) -> Leg:
        """Return how the run goes on under the plan that was found, behind the last step that is committed."""
        assert self._found is not None, "there is one"
        generation = self._session.generations.following(0)
        return Leg(
            plan=replace(self._request.protected(self._found.plan), generation=generation, model=self._leg.plan.model),
            first_step=committed.step,
            kept=KeptState(verdict=committed.verdict),
            held_under=committed.plan,
            givers=givers_of(committed.plan, self._found.plan, committed.plan.devices),
            leaving=tuple(name for name in committed.plan.devices if name in self._going),
            reason=self._reason,
            considered=self._known - self._going,
            is_light=bool(self._going),
        )

    def _do_without(self, plan: Plan, here: frozenset[str], going: Mapping[str, str]) -> None:
        request, names = self._request, ", ".join(f"{name} leaves ({why})" for name, why in going.items())
        try:
            found = request.light_change(plan, here)
            request.check_plan(found.plan)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever becomes of the planning
            self._stop.ask_save()
            self._tell(f"{names}: no plan fits the others: {_said(error)}; it stays, and a checkpoint is written")
            return
        self._take(plan, found, f"{names}: {found.how}", *self._steps_s(plan, found.plan))

    def _consider(self, plan: Plan, here: frozenset[str], new: frozenset[str]) -> None:
        names = ", ".join(sorted(new))
        try:
            found, before_s, after_s = self._full_plan(plan, here)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever becomes of the planning
            self._tell(f"{names} joined, and stands by: no plan with it: {_said(error)}")
            return
        used = new & frozenset(found.plan.devices)
        if not used or not is_worth(before_s, after_s):
            self._tell(f"{names} joined, and stands by: steps would be no shorter with it")
            return
        self._take(plan, found, _better(f"{names} joined", found, before_s, after_s), before_s, after_s)

    def _improve(self, plan: Plan, here: frozenset[str]) -> None:
        request = self._request
        try:
            found, before_s, after_s = self._full_plan(plan, here)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever becomes of the planning
            self._tell(f"The light change of plan stays, for the planner has none: {_said(error)}")
            return
        move_s, _ = moved(request.profile, request.job.optimizer_state, plan, here, found.plan)
        if is_worth(before_s, after_s, move_s=move_s, steps_left=request.job.steps - self._leg.first_step):
            self._take(plan, found, _better("The planner's answer", found, before_s, after_s), before_s, after_s)

    def _full_plan(self, plan: Plan, here: frozenset[str]) -> tuple[NewPlan, float, float]:
        """Return the planner's answer, and the predicted seconds of a step now and then."""
        request, optimizer = self._request, self._request.job.optimizer_state
        found = full_plan(plan, request.profile, here, optimizer=optimizer)
        request.check_plan(found.plan)
        return found, *self._steps_s(plan, found.plan)

    def _steps_s(self, before: Plan, after: Plan) -> tuple[float, float]:
        profile, optimizer = self._request.profile, self._request.job.optimizer_state
        plans = before, self._request.protected(after)
        before_s, after_s = (protected_step_s(one, profile, optimizer) for one in plans)
        return before_s, after_s

    def _take(self, plan: Plan, found: NewPlan, reason: str, before_s: float, after_s: float) -> None:
        request = self._request
        self._ahead = ahead_of(request.profile, request.job.optimizer_state, plan, found.plan, (before_s, after_s))
        self._reason, self._planned_under, self._found = reason, plan.generation, found
        self._goes = self._ahead is None

    def _look_ahead(self, barrier: StepBarrier) -> None:
        """Have what was found worth it go ahead; go over without it when it takes too long."""
        if self._ahead is None or self._goes:
            return
        if self._until_s is None:
            self._until_s = time.monotonic() + min(self._ahead.patience_s, _LEAVE_S if self._going else math.inf)
            self._begin_ahead(self._ahead, barrier)
        elif time.monotonic() > self._until_s:
            self._goes = True

    def _begin_ahead(self, ahead: MovesAhead, barrier: StepBarrier) -> None:
        coordinator, plan, request = self._session.coordinator, barrier.plan, self._request
        takers = {copy.taker for copy in ahead.copies}
        new = [name for name in takers if name not in plan.devices]
        self._changes += 1
        try:
            change = AheadChange(
                number=self._changes,
                generation=self._planned_under,
                copies=ahead.copies,
                newcomers=coordinator.peers(new),
            )
            order = FollowOrder(
                plan=plan,
                graph=request.profile.graph,
                job=request.job,
                peers=(*coordinator.peers(plan.devices), *change.newcomers),
                change=change,
            )
            if not barrier.take_ahead(change):
                self._goes = True
                return
            coordinator.follow(dict.fromkeys(new, order), lambda name, why: self._follower_gone(barrier, name, why))
        except DeviceLostError as error:
            self._follower_gone(barrier, error.device, error.why)
            return
        self._tell(
            f"{format_bytes(ahead.size_bytes)} of state go ahead to {few(sorted(takers))} beside the steps, for "
            f"another plan ({format_seconds(ahead.move_s)} of the links)"
        )

    def _follower_gone(self, barrier: StepBarrier, device: str, why: str) -> None:
        """Forget a plan with a device that went away before it had a part in the run."""
        if self._drop(barrier) and device not in barrier.plan.devices:
            self._tell(f"{device} was lost ({why}) before it had a part in the run, which goes on as it is")

    def _drop(self, barrier: StepBarrier) -> bool:
        """Forget the plan that was found, and what goes ahead of it; a run that goes over now, or is over, does not."""
        self._changes += 1
        if not barrier.take_ahead(AheadChange(number=self._changes, generation=barrier.plan.generation)):
            return False
        self._session.coordinator.follow({}, lambda _name, _why: None)
        copies = self._ahead.copies if self._ahead is not None else ()
        self._known -= {copy.taker for copy in copies if copy.taker not in barrier.plan.devices}
        self._found, self._ahead, self._until_s, self._goes = None, None, None, False
        return True


def _better(why: str, found: NewPlan, before_s: float, after_s: float) -> str:
    return f"{why}: {found.how}, steps of {format_seconds(after_s)} after {format_seconds(before_s)} predicted"


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, SpanTrainError) else f"{type(error).__name__}: {error}"
