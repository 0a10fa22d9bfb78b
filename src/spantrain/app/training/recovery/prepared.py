"""Light changes of plan that are worked out beforehand, for the loss of each device."""

import threading
import time
from collections.abc import Callable
from typing import Self

from spantrain.core.plan import Plan
from spantrain.planner.present import NewPlan

_REST = 1
"""How many times as long as it works a thread rests, for the coordinator's other threads."""

LightChange = Callable[[Plan, frozenset[str]], NewPlan]
"""Gives the light change of a plan for devices that are left."""


class PreparedChanges:
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

    def __enter__(self) -> Self:
        return self

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
