"""Asks for a better plan while devices train, and does not make them wait for the answer.

An adviser is asked in a thread of its own with the reports of the last step. What it answers within moments is taken
at once, what it has answered by the end of a later step is taken there. It is asked again when it has answered.
Whatever it does wrong is told once, and training goes on with the present plan.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Protocol

from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.errors import PlanError
from spantrain.runtime.control.requests import DeviceReport
from spantrain.schedule.joint import joint_refusal
from spantrain.schedule.layout import check_limits

Reports = Mapping[str, DeviceReport]
_AT_ONCE_S = 3e-3
"""Devices wait for an adviser at most so long, at the end of a step."""


class Advice(Record):
    """A plan for the steps to come, on the same devices."""

    plan: Plan
    """Its generation is whoever takes it to give."""
    reason: str


class Adviser(Protocol):
    """Looks for better plans; called from one thread, not always the same."""

    def advise(self, step: int, plan: Plan, reports: Reports) -> Advice | None:
        """Return what should run instead of `plan`, which has run this step, or None to leave it."""


@dataclass(eq=False)
class Advising(AbstractContextManager["Advising"]):
    """An adviser at work beside training; a context, at whose end it is asked no more."""

    adviser: Adviser
    plan: Plan
    """That runs."""
    _: KW_ONLY
    on_trouble: Callable[[str], None]
    """Is told of the first advice that fails, in a caller's thread."""
    finish: Callable[[Plan], Plan] = lambda plan: plan
    """Returns a plan as the run can go on under it, or raises a `PlanError`."""

    def __post_init__(self) -> None:
        self._told = self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="adviser")
        self._asked: Future[Advice | None] | None = None

    def take(self) -> Advice | None:
        """Return what was advised for the present plan, if anything, numbered as the next generation; it now runs."""
        if self._asked is None or not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        error = asked.exception()
        if error is not None:
            if not self._told:
                self._told, what = True, f"{type(error).__name__}: {error}"
                self.on_trouble(f"no advice on another plan ({what}); training goes on as it is")
            return None
        advice = asked.result()
        if advice is not None:
            self.plan = advice.plan
        return advice

    def ask(self, step: int, reports: Reports) -> Advice | None:
        """Have the reports of a step looked at, unless those of an earlier one still are; return what is said at once.

        An adviser that compares a few numbers has answered by then, and a plan for links that have recovered runs a
        step earlier.
        """
        if self._asked is None and not self._closed:
            self._asked = self._pool.submit(self._advise, step, self.plan, dict(reports))
            wait([self._asked], timeout=_AT_ONCE_S)
        return self.take()

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _advise(self, step: int, plan: Plan, reports: Reports) -> Advice | None:
        advice = self.adviser.advise(step, plan.unprotected, reports)
        if advice is None:
            return None
        check_change(plan, advice.plan)
        same = replace(plan, generation=plan.generation + 1)
        # What people read of a plan is none of the devices' business; their kinds and links are not to be advised on.
        lean = replace(
            self.finish(advice.plan),
            cluster=plan.cluster,
            model=plan.model,
            generation=same.generation,
            profile=plan.profile,
        )
        return None if lean == same else replace(advice, plan=lean)


def check_change(before: Plan, after: Plan) -> None:
    """Check that a run under one plan may go on under another without a restart.

    Raises:
        PlanError: it is for other devices, another model, batch or type, or would stop in the middle of a step.
    """
    problems = [
        f"{name} is {wanted} there, {got} now"
        for name, wanted, got in (
            ("devices", sorted(after.devices), sorted(before.devices)),
            ("model", after.model.name, before.model.name),
            ("number of units", after.stages[-1].end_unit, before.stages[-1].end_unit),
            ("global_batch", after.global_batch, before.global_batch),
            ("dtype", after.dtype, before.dtype),
        )
        if wanted != got
    ]
    if after.outer is not None:
        problems.append("sites train by themselves there")
    if refusal := joint_refusal(after):
        problems.append(refusal)
    problems += check_limits(after)
    if problems:
        raise PlanError(f"the plan that was advised cannot take over: {'; '.join(problems)}; advise one that can")
