"""Devices that join a run while it trains: a plan with them is made beside it, and taken behind a step if it is faster.

Asteroid and Sailor stop for it, Sailor for 11 s; here steps go on while the planner works, and state moves from memory
to memory where devices change what they hold.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from spantrain.app.session import Session
from spantrain.app.training.carry_on import Leg
from spantrain.app.training.requests import TrainRequest
from spantrain.core.plan import Plan
from spantrain.core.quantities import format_seconds
from spantrain.errors import SpanTrainError
from spantrain.planner.engine.predict import predict
from spantrain.planner.present import NewPlan, full_plan
from spantrain.runtime.control.orders import KeptState
from spantrain.runtime.coordinator.barrier import CommitPoint

_WORTH = 0.97
"""A plan is taken if its step is at most so long, over the present one's."""


class Newcomers:
    """Looks for devices that are here and have no part in what runs. Not for several threads at once."""

    def __init__(self, leg: Leg, session: Session, request: TrainRequest, tell: Callable[[str], None]) -> None:
        """`tell` is told of devices that stay without a part, in any thread."""
        self._leg, self._session, self._request, self._tell = leg, session, request, tell
        own = frozenset(leg.plan.devices)
        self._known = own if leg.considered is None else leg.considered | own
        """Devices that the present plan was made with in mind."""
        self._thread: threading.Thread | None = None
        self._found: NewPlan | None = None
        self._reason = ""

    @property
    def ready(self) -> bool:
        """Whether there is a plan that the run is to go over to; in any thread."""
        return self._found is not None

    def look(self, plan: Plan) -> None:
        """Have a plan made if somebody has come, beside the one that runs."""
        if self._thread is not None and self._thread.is_alive():
            return
        here = frozenset(self._session.coordinator.here())
        new = here - self._known
        self._known &= here | frozenset(plan.devices)
        if new and not self.ready:
            self._known |= here
            self._thread = threading.Thread(target=self._consider, args=(plan, here, new), name="planner", daemon=True)
            self._thread.start()

    def leg(self, committed: CommitPoint) -> Leg:
        """Return how the run goes on under the plan that was found, behind the last step that is committed."""
        assert self._found is not None, "there is one"
        generation = self._session.generations.following(0)
        return Leg(
            plan=replace(self._found.plan, generation=generation, model=self._leg.plan.model),
            first_step=committed.step,
            kept=KeptState(verdict=committed.verdict),
            held_under=committed.plan,
            reason=self._reason,
            considered=self._known,
        )

    def _consider(self, plan: Plan, here: frozenset[str], new: frozenset[str]) -> None:
        request, names = self._request, ", ".join(sorted(new))
        optimizer = request.job.optimizer_state
        try:
            found = full_plan(plan, request.profile, here, optimizer=optimizer)
            request.check_plan(found.plan)
            before_s = predict(plan, request.profile, optimizer=optimizer).step_s
            after_s = predict(found.plan, request.profile, optimizer=optimizer).step_s
        except Exception as error:  # noqa: BLE001 - training goes on, whatever becomes of the planning
            kind = "" if isinstance(error, SpanTrainError) else f"{type(error).__name__}: "
            self._tell(f"{names} joined, and stands by: no plan with it: {kind}{error}")
            return
        used = new & frozenset(found.plan.devices)
        if not used or after_s > _WORTH * before_s:
            self._tell(f"{names} joined, and stands by: steps would be no shorter with it")
            return
        steps = f"steps of {format_seconds(after_s)} after {format_seconds(before_s)} predicted"
        self._reason = f"{names} joined: {found.how}, {steps}"
        self._found = found
