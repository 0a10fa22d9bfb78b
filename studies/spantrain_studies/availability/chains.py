"""Pipelines that need not be alike, side by side on one model: what a step of them takes, and what moves between them.

Each pipeline is simulated by itself, as a plan of its samples. Gradients of each stage are summed by rings over those
that hold its units, beside the last backward passes, and rings that leave a site share the way there.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from spantrain.core.action import Op
from spantrain.core.profile import Profile
from spantrain.core.update.optimizers import STATE_COPIES
from spantrain.cost.network import NetworkCost
from spantrain.planner.engine.predict import predict
from spantrain.planner.request import JobSpec
from spantrain_studies.availability.layouts import Layouts
from spantrain_studies.availability.likeness import HostSymmetry

Place = tuple[str, str, bool]
"""Site and kind of a device, and whether it shares the host of the one before it: all that counts in a pipeline."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One pipeline: a device for each stage."""

    devices: tuple[str, ...]
    begins: tuple[int, ...]
    """Where stages begin, then the end."""

    @property
    def stages(self) -> dict[str, range]:
        """Units by device."""
        return {name: range(first, end) for name, (first, end) in zip(self.devices, pairwise(self.begins), strict=True)}


@dataclass(frozen=True, kw_only=True)
class ChainTime:
    """What a pipeline does in a step without the gradient sums."""

    step_s: float
    part: int
    """Samples of a micro-batch."""
    busy: tuple[float, ...]
    """By stage: the part of the step in which its device computes."""


class Chains:
    """Times of pipelines, each simulated once for all that are alike."""

    def __init__(self, profile: Profile, job: JobSpec) -> None:
        self.profile, self.job, self.network = profile, job, NetworkCost(profile)
        self.whole = Layouts(profile, job)
        """Of the whole batch; cuts, speeds and orders of devices are asked of it."""
        self.likeness = HostSymmetry(profile.cluster)
        self.rows: dict[frozenset[str], tuple[Chain, ...]] = {}
        """Pipelines that were chosen for devices."""
        self._times: dict[object, ChainTime | None] = {}
        self._cuts: dict[object, tuple[int, ...] | None] = {}
        self.layouts_of = lru_cache(maxsize=None)(self._layouts_of)
        self.memory = self.whole.assembler.memory
        self._trained = self.whole.assembler.trained_sums
        state = [
            unit.parameter_bytes + (unit.parameter_bytes - unit.frozen_bytes) * STATE_COPIES[job.optimizer]
            for unit in profile.graph.units
        ]
        self._state_bytes = dict(enumerate(state))

    def chain(self, devices: Sequence[str]) -> Chain | None:
        """Return the pipeline of these devices, in this order, cut so that the slowest is fastest; None: no room."""
        key = self._places(devices)
        if key not in self._cuts:
            self._cuts[key] = self.whole.cuts(tuple((name,) for name in devices), 1)
        begins = self._cuts[key]
        return None if begins is None else Chain(devices=tuple(devices), begins=begins)

    def time(self, chain: Chain, samples: int) -> ChainTime | None:
        """Return what a pipeline does with so many samples; None where it cannot."""
        key = (self._places(chain.devices), chain.begins, samples)
        if key not in self._times:
            self._times[key] = self._simulated(chain, samples)
        return self._times[key]

    def sample_s(self, chain: Chain) -> float:
        """Return the seconds of the slowest stage for a sample, or of the slowest cut, there and back."""
        spans, place = self.whole.assembler.spans, self.profile.cluster.device_by_name
        work = [spans.kind_seconds(place[name].kind, units, 1) for name, units in chain.stages.items()]
        cut = self.whole.assembler.cut_bytes
        moved = [
            float(cut[begin]) / self.network.link(a, b).bandwidth_bytes_per_s / 2
            for begin, (a, b) in zip(chain.begins[1:-1], pairwise(chain.devices), strict=True)
        ]
        return max((*work, *moved))

    def bound_s(self, chains: Sequence[Chain], samples: int) -> float:
        """Return what a step takes at least: of the slowest stages, then of the sums, which begin together."""
        work_s = samples / sum(1 / self.sample_s(chain) for chain in chains)
        if len(chains) == 1:
            return work_s
        return self._summed_s(chains, {name: work_s for chain in chains for name in chain.devices})

    def step_s(self, chains: Sequence[Chain], samples: Sequence[int], extra_s: Sequence[float] = ()) -> float | None:
        """Return the seconds of a step of pipelines side by side; None where one of them cannot run.

        Args:
            chains: pipelines, each with all units.
            samples: of each pipeline.
            extra_s: what each pipeline takes besides; empty: nothing.
        """
        ready: dict[str, float] = {}
        done: dict[str, float] = {}
        for index, (chain, count) in enumerate(zip(chains, samples, strict=True)):
            took = self.time(chain, count)
            if took is None:
                return None
            at_s = took.step_s + (extra_s[index] if extra_s else 0.0)
            for name, units in chain.stages.items():
                back_s = self._back_s(name, units, took.part)
                done[name], ready[name] = at_s, at_s - back_s
                at_s -= back_s
        last_s = max(done.values())
        return max(last_s, self._summed_s(chains, ready)) if len(chains) > 1 else last_s

    def copy_s(self, held: Mapping[str, Iterable[int]], wanted: Mapping[str, Iterable[int]]) -> float:
        """Return the seconds until devices have the state of units, each from its nearest holder, side by side.

        What nobody holds is read over the fastest link to the device, as with our own moves.
        """
        has = {name: set(units) for name, units in held.items()}
        longest_s = 0.0
        for name, units in wanted.items():
            own_s = 0.0
            for unit in set(units) - has.get(name, set()):
                givers = [one for one in has if unit in has[one]] or list(self.profile.cluster.device_by_name)
                size = self._state_bytes[unit]
                own_s += min(
                    (self.network.transfer_seconds(one, name, size) for one in givers if one != name), default=0
                )
            longest_s = max(longest_s, own_s)
        return longest_s

    def _layouts_of(self, samples: int) -> Layouts:
        job = JobSpec(global_batch=samples, optimizer=self.job.optimizer, dtype=self.job.dtype)
        return Layouts(self.profile, job)

    def _simulated(self, chain: Chain, samples: int) -> ChainTime | None:
        laid = self.layouts_of(samples).grid(tuple((name,) for name in chain.devices), chain.begins)
        if laid is None:
            return None
        result = predict(laid.plan, self.profile)
        return ChainTime(
            step_s=laid.step_s,
            part=max(span.size for span in laid.plan.stages[0].micro_batches),
            busy=tuple(result.utilisation[name] for name in chain.devices),
        )

    def _places(self, devices: Sequence[str]) -> tuple[Place, ...]:
        place = self.profile.cluster.device_by_name
        before = (None, *devices[:-1])
        return tuple(
            (place[name].site, place[name].kind, last is not None and place[last].host == place[name].host)
            for last, name in zip(before, devices, strict=True)
        )

    def _back_s(self, name: str, units: range, samples: int) -> float:
        kind = self.profile.cluster.device_by_name[name].kind
        return self.whole.assembler.spans.compute.kind_seconds(units, kind, Op.BACKWARD, samples)

    def _summed_s(self, chains: Sequence[Chain], ready: Mapping[str, float]) -> float:
        """Return when all gradients are summed: each device sums one stage after another, once all have begun."""
        ends = sorted({begin for chain in chains for begin in chain.begins})
        of_device: defaultdict[str, float] = defaultdict(float)
        begin: defaultdict[str, float] = defaultdict(float)
        over: defaultdict[frozenset[str], float] = defaultdict(float)
        place = self.profile.cluster.device_by_name
        for first, end in pairwise(ends):
            holders = tuple(name for chain in chains for name, units in chain.stages.items() if first in units)
            ring_s = self.network.collectives.seconds(holders, float(self._trained[end] - self._trained[first]))
            starts_s = max(ready[name] for name in holders)
            for name in holders:
                of_device[name] += ring_s
                begin[name] = max(begin[name], starts_s)
            sites = frozenset(place[name].site for name in holders)
            if len(sites) > 1:
                over[sites] += ring_s
        shared_s = min(ready.values()) + max(over.values(), default=0.0)
        return max(shared_s, *(begin[name] + of_device[name] for name in of_device))
