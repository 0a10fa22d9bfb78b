"""A run whose devices change, or have less memory: what goes on, from where, what is told.

Sailor, 4.4, plans anew for what is left and goes back to a checkpoint; Asteroid, 3.4, has neighbours keep what a lost
device held. Here survivors keep their state, and where they hold the whole model nothing is lost but the step that was
under way; else all go back to the newest checkpoint, or to where the run began.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import field, replace

from spantrain.app.planning.protection import protected_step_s
from spantrain.app.session import Session
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.resume import Resume
from spantrain.app.training.stop import StopRequest
from spantrain.config.files.problems import shortened
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes, format_seconds
from spantrain.core.records import Record
from spantrain.cost.memory import MemoryCost, framework_bytes
from spantrain.errors import PeerLostError, PlanError, SpanTrainError, WorkerError
from spantrain.planner.present import NewPlan
from spantrain.recovery.policy import holds_all
from spantrain.runtime.control.orders import GiveOrder, KeptState, TrainOrder
from spantrain.runtime.coordinator.barrier import CommitPoint, StepBarrier
from spantrain.runtime.coordinator.roster import DeviceLostError, DeviceMemoryError

_LESS = 0.8
"""Part of what was reckoned besides the framework's memory, with which a device that ran out of it is planned then."""
_BACK_S, _SHOWN = 60.0, 160
"""Seconds for which devices that were lost all at once are awaited; letters of what one says of its memory."""


class Leg(Record):
    """A part of a run in which its devices stay the same: one train order for each of them."""

    plan: Plan
    first_step: int
    resume: Resume | None = None
    kept: KeptState | None = None
    """Begin with what devices hold already."""
    held_under: Plan | None = None
    """The plan by which they hold it."""
    reason: str = ""
    """Why there is a new one; empty for the first."""
    givers: tuple[str, ...] = ()
    """Devices that are not in the plan, and give first what they hold; then they stand by."""
    leaving: tuple[str, ...] = ()
    """Those of them that go instead."""
    considered: frozenset[str] | None = None
    """Devices that were thought of when its plan was made; None: those of the plan."""
    is_light: bool = False
    """Whether its plan was made in a moment, and the planner may know a better one."""
    is_over: bool = False
    """Whether all steps are done: what is left is to save, and to evaluate."""
    begun_s: float = field(default_factory=time.monotonic)
    """When that was known, by the monotonic clock."""
    parts: tuple[tuple[str, float], ...] = ()
    """What has taken how many seconds since, as far as it is known."""


def orders_of(
    leg: Leg, session: Session, request: TrainRequest, samples_before: int
) -> dict[str, TrainOrder | GiveOrder]:
    """Return the order of each device that trains, or gives what it holds and leaves."""
    resume, peers = leg.resume, session.coordinator.peers((*leg.plan.devices, *leg.givers))
    order = TrainOrder(
        plan=leg.plan, graph=request.profile.graph, job=request.job, peers=peers,
        output_dir=request.folder_to_workers(request.out) if request.checkpoints else "", first_step=leg.first_step,
        samples_before=samples_before, resume_from=request.folder_to_workers(resume.folder) if resume else "",
        checkpoint=resume.content if resume else None, at_coordinator=resume.here if resume else (), kept=leg.kept,
        givers=leg.givers, outer=request.options.outer, is_over=leg.is_over,
    )  # fmt: skip
    orders: dict[str, TrainOrder | GiveOrder] = dict.fromkeys(leg.plan.devices, order)
    if (standby := request.options.standby_coordinator) in orders:
        orders[standby] = replace(order, journal_dir=request.folder_to_workers(request.out))
    if leg.kept is not None:
        gives = GiveOrder(plan=leg.plan, peers=peers, first_step=leg.first_step, kept=leg.kept)
        orders |= dict.fromkeys(leg.givers, gives)
    return orders


def givers_of(held_under: Plan, plan: Plan, present: Collection[str]) -> tuple[str, ...]:
    """Return who of those present holds something by one plan and has no part in another."""
    return tuple(name for name in held_under.devices if name in present and name not in plan.devices)


def about_pause(leg: Leg, before: Plan, request: TrainRequest, stood_still_s: float) -> str:
    """Say how long a run stood still before a leg, what for, and what is predicted of steps now and before."""
    rest = ("state moves", stood_still_s - sum(took_s for _, took_s in leg.parts))
    parts = ", ".join(f"{what} {format_seconds(took_s)}" for what, took_s in (*leg.parts, rest))
    figures = (
        plan.global_batch / protected_step_s(plan, request.profile, request.job.optimizer_state)
        for plan in (before, leg.plan)
    )
    speeds = " -> ".join(f"{samples_per_s:.3g}" for samples_per_s in figures)
    what = "The end of the run" if leg.is_over else "Training"
    after = f"{what} goes on after {format_seconds(stood_still_s)}{f' ({parts})' if leg.parts else ''}"
    return after if leg.is_over else f"{after}; {speeds} samples/s predicted"


class Setback(Record):
    """A leg has ended in mid-step: a device was lost, or its memory did not suffice."""

    error: DeviceLostError | DeviceMemoryError
    """Which one, and on what evidence."""
    known_s: float
    """When that was known, by the monotonic clock."""
    committed: CommitPoint
    """What had happened by then."""
    holders: tuple[str, ...]
    """Devices of its plan that are still here, and hold what they should."""
    short: Mapping[str, str]
    """Devices that are still here whose memory did not suffice, and what each says of it."""


def setback_of(
    error: DeviceLostError | DeviceMemoryError, leg: Leg, barrier: StepBarrier, session: Session, stop: StopRequest,
    tell: Callable[[str], None],
) -> Setback:  # fmt: skip
    """Have all devices of a leg leave the step under way; return what is left of the leg.

    If none is, it was rather this machine that stood still or was cut off: they come back, with what they hold. `tell`
    hears of that, and a stop ends it.
    """
    known_s, coordinator, missing = time.monotonic(), session.coordinator, [*leg.plan.devices]
    barrier.abort(str(error))
    here = coordinator.settle((*leg.plan.devices, *leg.givers))
    until_s = time.monotonic()
    if not (here or coordinator.holders(barrier.committed.step)) and session.workers is None:
        tell(f"None of the devices is heard ({error.why}): all are awaited for {format_seconds(_BACK_S)}")
        until_s += _BACK_S
    while missing and time.monotonic() < until_s and not stop.wanted:
        missing = coordinator.missing(leg.plan.devices, unlike=missing)
    failures, committed = coordinator.failures(), barrier.committed
    holders = [name for name in here if name not in failures or failures[name].holds]
    return Setback(
        error=error,
        known_s=known_s,
        committed=committed,
        holders=(*holders, *coordinator.holders(committed.step)),
        short={name: failures[name].error for name in here if name in failures and failures[name].out_of_memory},
    )


def with_less_memory(request: TrainRequest, plan: Plan, devices: Collection[str]) -> TrainRequest:
    """Return a request that plans for less memory on some devices than a plan was to need there."""
    profile = request.profile
    peaks = MemoryCost(profile, request.job.optimizer_state, plan.dtype).plan_peak_bytes(plan)
    less = dict[str, int]()
    for name in devices:
        device = profile.cluster.device_by_name[name]
        reckoned = min(peaks.get(name, device.memory_bytes), device.memory_bytes)
        fixed = min(reckoned, framework_bytes(device.backend))
        less[name] = fixed + int(_LESS * (reckoned - fixed))
    return replace(request, profile=replace(profile, cluster=profile.cluster.with_memory(less)))


def leg_after(
    leg: Leg, setback: Setback, session: Session, request: TrainRequest, changes: "PreparedChanges",
    newest: Callable[[Collection[str]], Resume | None],
) -> Leg:  # fmt: skip
    """Return how a run goes on without a device, or with less on one.

    Args:
        leg: that has ended.
        setback: by what.
        session: where the run runs.
        request: what was asked for, with less memory where it did not suffice (`with_less_memory`).
        changes: gives the light change of a plan for devices that are left.
        newest: gives the newest complete checkpoint of the run that devices which are present can begin with.

    Raises:
        PeerLostError, WorkerError: it cannot go on; says why.
    """
    committed, holders, settled_s = setback.committed, setback.holders, time.monotonic()
    present = frozenset(holders) - frozenset(leg.leaving) | frozenset(session.coordinator.here())
    if not present:
        raise setback.error
    found = _checked(setback, request, lambda: changes.light_plan(leg.plan, present))
    plan = replace(request.protected(found.plan), generation=session.generations.following(0), model=leg.plan.model)
    parts = (("all stand still", settled_s - setback.known_s), ("a new plan", time.monotonic() - settled_s))
    did_step = committed.step > leg.first_step
    held_under = committed.plan if did_step else leg.held_under
    verdict = committed.verdict or (leg.kept.verdict if leg.kept else None)
    is_over = leg.is_over or (verdict is not None and verdict.stop)
    what = _what_happened(setback, request.profile)
    after = Leg(
        plan=plan, first_step=committed.step, considered=present, is_light=True, begun_s=setback.known_s, parts=parts,
        is_over=is_over,
    )  # fmt: skip
    if held_under is not None and holds_all(held_under, holders) and not request.job.staleness:
        comes = "all steps are done" if is_over else f"step {committed.step + 1} is trained again"
        return replace(
            after, kept=KeptState(verdict=verdict), held_under=held_under, reason=f"{what}: {comes}, {found.how}",
            givers=givers_of(held_under, plan, holders),
            leaving=() if did_step else tuple(name for name in leg.leaving if name in holders),
        )  # fmt: skip
    if request.batches is not None and held_under is not None:
        raise _no_way(setback, "what it held is held by no other device, and the loop that gives batches goes not back")
    resume = newest(present)
    first_step = resume.content.step if resume else 0
    back = f"step {first_step + 1} is trained again" if held_under is None else _goes_back(resume, committed.step)
    is_over = is_over and first_step == committed.step
    return replace(after, first_step=first_step, resume=resume, is_over=is_over, reason=f"{what}: {back}, {found.how}")


def _goes_back(resume: Resume | None, steps: int) -> str:
    """Return in a phrase to where a run goes back that has so many steps done."""
    where = f"the checkpoint after {resume.content.step} steps" if resume else "the beginning"
    again = steps - (resume.content.step if resume else 0)
    return (
        f"what it held is held by no other device, so all go back to {where} "
        f"({again} step{' is' if again == 1 else 's are'} trained again)"
    )


def _what_happened(setback: Setback, profile: Profile) -> str:
    """Return in a phrase what a run goes on after."""
    found = [f"{setback.error.device} lost ({setback.error.why})"] if setback.error.device not in setback.short else []
    for name, said in setback.short.items():
        planned = format_bytes(profile.cluster.device_by_name[name].memory_bytes)
        why = shortened(" ".join(said.split()), _SHOWN)
        found.append(f"{name} ran out of memory ({why}), and is planned with {planned} from now on")
    return "; ".join(found)


def _checked(setback: Setback, request: TrainRequest, light: Callable[[], NewPlan]) -> NewPlan:
    """Return the light change, if there is one that the run can have."""
    try:
        found = light()
        request.check_plan(found.plan)
    except PlanError as reason:
        raise _no_way(setback, f"no plan fits the devices that are left: {reason}") from None
    return found


def _no_way(setback: Setback, why: str) -> SpanTrainError:
    if setback.short:
        return WorkerError(f"{setback.error}; the run cannot go on with less memory there: {why}")
    return PeerLostError(f"{setback.error}; the run cannot go on without it: {why}")


_REST = 1
"""How many times as long as it works a thread rests, for the coordinator's other threads."""

LightChange = Callable[[Plan, frozenset[str]], NewPlan]
"""Gives the light change of a plan for devices that are left."""


class PreparedChanges(AbstractContextManager["PreparedChanges"]):
    """Knows the light change of the present plan for each device that may be lost; a context."""

    def __init__(self, light: LightChange) -> None:
        self._light = light
        self._lock = threading.Lock()
        self._for: tuple[Plan, frozenset[str]] | None = None
        """What changes are known of: the plan, and the devices that are here."""
        self._known: dict[frozenset[str], NewPlan] = {}
        """By devices left."""
        self._stop = threading.Event()
        """Ends the thread that works, behind the change that it is at."""

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def plan_by(self, light: LightChange) -> None:
        """Have changes be worked out otherwise, and forget those that are known."""
        self._stop.set()
        with self._lock:
            self._light, self._for, self._known = light, None, {}

    def prepare(self, plan: Plan, here: frozenset[str]) -> None:
        """Work out changes of a plan, in a thread, if they are not known yet; those of another are forgotten."""
        if self._for == (plan, here):
            return
        self._stop.set()
        self._stop = threading.Event()
        with self._lock:
            self._for, self._known = (plan, here), {}
        arguments = (plan, here, self._stop)
        threading.Thread(target=self._work, args=arguments, name="prepared changes", daemon=True).start()

    def light_plan(self, plan: Plan, present: frozenset[str]) -> NewPlan:
        """Return the light change of a plan for devices that are left, at once if it is known.

        Raises:
            PlanError, ProfileError: as `planner.present.light_plan`.
        """
        self._stop.set()
        with self._lock:
            known = self._known.get(present) if self._for is not None and self._for[0] == plan else None
        return known or self._light(plan, present)

    def _work(self, plan: Plan, here: frozenset[str], stop: threading.Event) -> None:
        # First those that have a stage for themselves: what is left has most to change.
        for stage in sorted(plan.stages, key=lambda stage: len(stage.devices)):
            for name in stage.devices:
                begun_s = time.monotonic()
                try:
                    found = self._light(plan, here - {name})
                except Exception:  # noqa: BLE001 - said when it comes to that, and the run asks again
                    continue
                with self._lock:
                    if stop.is_set():
                        return
                    self._known[here - {name}] = found
                if stop.wait(_REST * (time.monotonic() - begun_s)):
                    return
