"""Equal grids and single pipelines over the devices present, with the costs that all systems here are reckoned by.

In the rivals' favour: cuts know the slowest device of each place, slow devices may be left out, both ways to lay a grid
over sites are tried, and orders of work are the better of 1F1B and ours (`critical-path`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spantrain.core.plan import Plan, SumModel
from spantrain.core.profile import Profile
from spantrain.cost.span_tables import Array, over_spans
from spantrain.errors import InfeasiblePlanError, PlanError, ScheduleError
from spantrain.planner.assembly.assemble import StageShape, least_largest, with_limits
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import JobSpec, PlanRequest
from spantrain_studies.planners.assembler import PaperAssembler

Slots = tuple[tuple[str, ...], ...]
"""The devices of each stage, one of each pipeline."""
_SIMULATED = 3
_PLACES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Numbers of stages that are tried."""
_PART_SIZES = (1, 2, 4, 8, 16)
"""Samples of a micro-batch that one device is given."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """A grid with its predicted seconds."""

    plan: Plan
    step_s: float
    slots: Slots

    @property
    def begins(self) -> tuple[int, ...]:
        """Where each stage begins, then the end."""
        return (*(stage.first_unit for stage in self.plan.stages), self.plan.stages[-1].end_unit)


class Layouts:
    """Lays a job over devices."""

    def __init__(self, profile: Profile, job: JobSpec) -> None:
        self.profile, self.job = profile, job
        self.evaluate = Evaluator(profile, job)
        request = PlanRequest(profile=profile, job=job, evaluate=self.evaluate)
        self.assembler = PaperAssembler(request, SumModel.SPANTRAIN)
        self.units = self.assembler.units

    @cached_property
    def sample_s(self) -> dict[str, float]:
        """Seconds of a sample through the whole model, by device."""
        spans, everything = self.assembler.spans, range(self.units)
        kinds = sorted({one.kind for one in self.profile.cluster.devices})
        by_kind = {kind: spans.kind_seconds(kind, everything, 1) for kind in kinds}
        return {one.name: by_kind[one.kind] for one in self.profile.cluster.devices}

    def fastest(self, present: frozenset[str]) -> list[str]:
        """Return devices, the fastest first; those of a site and a host stay together where they are as fast."""
        place = self.profile.cluster.device_by_name
        order = {name: index for index, name in enumerate(place)}
        return sorted(present, key=lambda name: (self.sample_s[name], order[name]))

    def in_places(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return devices site by site, and host by host, those with the most power first; the fastest first in each."""
        place = self.profile.cluster.device_by_name

        def power(key: str, name: str) -> float:
            own = getattr(place[name], key)
            return -sum(1 / self.sample_s[one] for one in names if getattr(place[one], key) == own)

        return tuple(
            sorted(
                names,
                key=lambda name: (
                    power("site", name), place[name].site, power("host", name), place[name].host, self.sample_s[name]
                ),
            )
        )  # fmt: skip

    def subsets(self, present: frozenset[str]) -> Iterator[tuple[str, ...]]:
        """Yield all devices, all of the fastest kinds, and each site's, the fastest first."""
        place, fastest = self.profile.cluster.device_by_name, self.fastest(present)
        speeds = sorted({self.sample_s[name] for name in fastest})
        seen = set()
        for most_s in reversed(speeds):
            for site in (None, *sorted({place[name].site for name in fastest})):
                found = tuple(
                    name for name in fastest if self.sample_s[name] <= most_s and site in (None, place[name].site)
                )
                if found and found not in seen:
                    seen.add(found)
                    yield found

    def cuts(self, slots: Slots, samples: int, in_flight: int | None = None) -> tuple[int, ...] | None:
        """Return where stages begin, then the end, so that the slowest is fastest; None where they do not fit.

        Args:
            slots: devices of each stage; the slowest of each counts.
            samples: of a micro-batch, for each device.
            in_flight: micro-batches held by the first stage; None: one for each stage.
        """
        if len(slots) > self.units:
            return None
        spans, found = self.assembler.spans, list[Array]()
        cut_bytes, place = self.assembler.cut_bytes, self.profile.cluster.device_by_name
        for index, slot in enumerate(slots):
            kinds = sorted({place[name].kind for name in slot})
            slowest = max(kinds, key=lambda kind: spans.kind_seconds(kind, range(self.units), samples))
            cost = over_spans(self.assembler.work_sums([slowest], samples))
            if index:
                links = [spans.network.link(a, b) for a, b in zip(slots[index - 1], slot, strict=True)]
                arrives_s = samples * cut_bytes / min(link.bandwidth_bytes_per_s for link in links)
                cost = np.maximum(cost, arrives_s[:, None])
            held = min(in_flight or len(slots), len(slots)) - index
            need = spans.need(slot[0], samples * max(1, held), samples)
            found.append(np.where(need <= min(place[name].memory_bytes for name in slot), cost, np.inf))
        slowest_s, begins = least_largest(found)
        return begins if slowest_s < math.inf else None

    def grids(self, present: frozenset[str], places: Sequence[int] = _PLACES) -> list[Laid]:
        """Return equal grids, the best first: as many stages as each of `places` says, and as many pipelines as go."""
        drafts: list[tuple[float, Slots, Plan]] = []
        for names in self.subsets(present):
            for count in places:
                if count > min(len(names), self.units):
                    break
                for slots in self._slots(names, count):
                    drafts += self._drafts(slots)
        return self._simulated(drafts)

    def grid(self, slots: Slots, begins: tuple[int, ...] | None = None) -> Laid | None:
        """Return the best plan of these stages; None where they do not fit. `begins`: cuts that are given."""
        found = self._simulated(list(self._drafts(slots, begins)))
        return found[0] if found else None

    def _slots(self, names: tuple[str, ...], places: int) -> Iterator[Slots]:
        """Yield both ways to lay equal pipelines over the fastest devices."""
        width = len(names) // places
        chosen = self.in_places(names[: width * places])
        yield tuple(chosen[index::places] for index in range(places))
        if width > 1 and places > 1:
            yield tuple(chosen[index * width : (index + 1) * width] for index in range(places))

    def _drafts(self, slots: Slots, given: tuple[int, ...] | None = None) -> Iterator[tuple[float, Slots, Plan]]:
        width, batch = len(slots[0]), self.job.global_batch
        if width > batch:
            return
        for part in _PART_SIZES:
            size = part * width
            if size > batch:
                return
            begins = given or self.cuts(slots, part, batch // size)
            if begins is None:
                continue
            shapes = [
                StageShape(units=range(first, end), devices=slot)
                for slot, first, end in zip(slots, begins[:-1], begins[1:], strict=True)
            ]
            try:
                plan = self.assembler.plan(shapes, size, "1f1b")
            except InfeasiblePlanError:
                continue
            yield self.assembler.step_cost.estimate(plan).step_s, slots, plan

    def _simulated(self, drafts: list[tuple[float, Slots, Plan]]) -> list[Laid]:
        drafts.sort(key=lambda draft: draft[0])
        found = []
        for _, slots, plan in drafts[:_SIMULATED]:
            for tried in (plan, self._in_our_order(plan)):
                try:
                    step_s = self.evaluate(tried).step_s if tried else math.inf
                except (PlanError, ScheduleError):
                    continue
                if tried and step_s < math.inf:
                    found.append(Laid(plan=tried, step_s=step_s, slots=slots))
        return sorted(found, key=lambda laid: laid.step_s)

    def _in_our_order(self, plan: Plan) -> Plan | None:
        """Return a plan with our order of work, as far as memory lets samples be in flight."""
        stages = [with_limits(stage, self.assembler.memory, splits=True) for stage in plan.stages]
        made = tuple(stage for stage in stages if stage is not None)
        return replace(plan, schedule="critical-path", stages=made) if len(made) == len(stages) else None
