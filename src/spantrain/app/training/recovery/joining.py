"""Devices that join a run while it trains, or leave it: a plan for those that are then there is made beside it.

So is one behind a loss, or when a device has left: the light change came at once, and the planner may know better.

Asteroid and Sailor stop for it, Sailor for 11 s; here steps go on while the planner works, and state moves from memory
to memory where devices change what they hold. A device that joins is taken in behind a step if steps get shorter; one
that leaves goes when others have what it held.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from spantrain.app.live_requests import DRAIN, taken
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session
from spantrain.app.training.recovery.carry_on import Leg, givers_of
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.core.plan import Plan
from spantrain.core.quantities import format_seconds
from spantrain.cost.moving import moved
from spantrain.errors import SpanTrainError
from spantrain.planner.engine.predict import predict
from spantrain.planner.present import NewPlan, full_plan, light_plan
from spantrain.recovery.policy import is_worth
from spantrain.runtime.control.orders import KeptState
from spantrain.runtime.coordinator.barrier import CommitPoint


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
        self._going: frozenset[str] = frozenset()
        """Devices that want to leave, and were thought of."""
        self._is_light = leg.is_light

    @property
    def ready(self) -> bool:
        """Whether there is a plan that the run is to go over to; in any thread."""
        return self._found is not None

    def look(self, plan: Plan) -> None:
        """Have a plan made if somebody has come or wants to leave (or is to, by files), beside the one that runs."""
        coordinator = self._session.coordinator
        for device in taken(self._request.out, DRAIN):
            if not coordinator.ask_to_leave(device, "asked to by spantrain drain"):
                self._tell(f"spantrain drain: there is no device {device} in this run now")
        leaving = coordinator.leaving()
        idle = [name for name in leaving if name not in plan.devices and name not in self._leg.leaving]
        for name in idle:
            self._tell(f"{name} left ({leaving[name]}): it had no part in the run")
        coordinator.dismiss(idle)
        if self.ready or (self._thread is not None and self._thread.is_alive()):
            return
        here = frozenset(coordinator.here())
        new, going = here - self._known, frozenset(leaving) & frozenset(plan.devices)
        self._known &= here | frozenset(plan.devices)
        if going - self._going or (going and new):
            self._going, self._known = going, self._known | here
            self._plan_in_background(self._do_without, plan, here, {name: leaving[name] for name in going})
        elif new:
            self._known |= here
            self._is_light = False
            self._plan_in_background(self._consider, plan, here, new)
        elif self._is_light:
            self._is_light = False
            self._plan_in_background(self._improve, plan, here)

    def _tell(self, text: str) -> None:
        """Have people told of what changes nothing; in any thread."""
        self._session.coordinator.later(lambda: self._reporter.note(text))

    def _plan_in_background(self, work: Callable[..., None], *arguments: object) -> None:
        self._thread = threading.Thread(target=work, args=arguments, name="planner", daemon=True)
        self._thread.start()

    def leg(self, committed: CommitPoint) -> Leg:
        """Return how the run goes on under the plan that was found, behind the last step that is committed."""
        assert self._found is not None, "there is one"
        generation = self._session.generations.following(0)
        here = self._session.coordinator.here()
        return Leg(
            plan=replace(self._request.protected(self._found.plan), generation=generation, model=self._leg.plan.model),
            first_step=committed.step,
            kept=KeptState(verdict=committed.verdict),
            held_under=committed.plan,
            givers=givers_of(committed.plan, self._found.plan, {*here, *self._going}),
            leaving=tuple(name for name in committed.plan.devices if name in self._going),
            reason=self._reason,
            considered=self._known - self._going,
            is_light=bool(self._going),
        )

    def _do_without(self, plan: Plan, here: frozenset[str], going: Mapping[str, str]) -> None:
        request, names = self._request, ", ".join(f"{name} leaves ({why})" for name, why in going.items())
        try:
            found = light_plan(plan, request.profile, here, optimizer=request.job.optimizer_state)
            request.check_plan(found.plan)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever becomes of the planning
            self._stop.ask_save()
            self._tell(f"{names}: no plan fits the others: {_said(error)}; it stays, and a checkpoint is written")
            return
        self._reason = f"{names}: {found.how}"
        self._found = found

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
        self._take(found, f"{names} joined", before_s, after_s)

    def _improve(self, plan: Plan, here: frozenset[str]) -> None:
        request = self._request
        try:
            found, before_s, after_s = self._full_plan(plan, here)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever becomes of the planning
            self._tell(f"The light change of plan stays, for the planner has none: {_said(error)}")
            return
        move_s, _ = moved(request.profile, request.job.optimizer_state, plan, here, found.plan)
        if is_worth(before_s, after_s, move_s=move_s, steps_left=request.job.steps - self._leg.first_step):
            self._take(found, "The planner's answer", before_s, after_s)

    def _full_plan(self, plan: Plan, here: frozenset[str]) -> tuple[NewPlan, float, float]:
        """Return the planner's answer, and the predicted seconds of a step now and then."""
        request, optimizer = self._request, self._request.job.optimizer_state
        found = full_plan(plan, request.profile, here, optimizer=optimizer)
        request.check_plan(found.plan)
        before_s, after_s = (predict(one, request.profile, optimizer=optimizer).step_s for one in (plan, found.plan))
        return found, before_s, after_s

    def _take(self, found: NewPlan, why: str, before_s: float, after_s: float) -> None:
        steps = f"steps of {format_seconds(after_s)} after {format_seconds(before_s)} predicted"
        self._reason = f"{why}: {found.how}, {steps}"
        self._found = found


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, SpanTrainError) else f"{type(error).__name__}: {error}"
