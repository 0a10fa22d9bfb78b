"""Bytes that a device needs for its part of a plan: a hard limit (DESIGN idea 5).

Gradients and optimizer state are those of the parameters that are trained (`UnitGraph.held_trained_bytes`); of weights
that are some steps old there are further sets of those only.

A member of a tensor-parallel group has, of parameters, gradients and optimizer state, whole pieces of what is divided
and all of the rest (`UnitGraph.held_parameter_bytes`); of activations what was measured on members
(`UnitGraph.held_activation_bytes`); it has all of other units, and messages whole. State sharding
(`core.shares.StateSharding`) divides optimizer state evenly among the replicas, from zero2 on gradients too, zero3 also
the parameters. Beside its part a device then holds the largest unit's gradients twice, as they are and as they are
sent, and of zero3 its parameters twice, of the unit at work and of the next, and those that units share. Under autocast
a span in flight holds what its products rounded of the weights, which no division makes less; `bfloat16-weights` has no
such copies. What is offloaded is so in the host's memory, all of it.

Activations of a stage are its units', each cut between them once. Recomputed units (`core.plan.Stage.recompute`) hold
what enters them, and besides the largest of them, run again, for the span at work (Chen et al., "Training Deep Nets
with Sublinear Memory Cost", 2016; kept: run again from a held input; not: segments of many units, here each is one).
Behind I, a span holds what W needs (`core.units.Unit.deferred_bytes_per_sample`), often more than before. A sample is
in flight until W, so that with a schedule that splits backward it counts in a need, and in an in-flight limit, the more
of both (`Division.splits`); not on the first stage, which goes back at once.

While an action runs, its operations need tensors that nobody holds when it is over: in the layer that makes logits, and
their loss, more than all that is held of it (`core.units.Unit.working_bytes_per_sample`). One unit works at a time, so
the one that needs most counts, for the largest micro-batch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from spantrain.core.action import Action, Op
from spantrain.core.plan import Crew, Plan, Stage
from spantrain.core.profile import Profile
from spantrain.core.shares import ALONE, StateSharding
from spantrain.core.update.optimizers import STATE_COPIES
from spantrain.cost.held_sizes import WHOLE, Division, HeldBytes, HeldSizes, MemoryNeed, stage_divisions
from spantrain.devices.registry import CONTEXT_BYTES, find_backend
from spantrain.formats.precision import LOW_WEIGHTS, gathered_ratio, is_low
from spantrain.formats.registry import WireFormat
from spantrain.schedule.dispatch.policies import Task, known_order
from spantrain.schedule.registry import replica_tasks

BUFFERED_MICRO_BATCHES = 2
"""Messages of each neighbour and direction that are held at once: one at work, one on its way."""


def framework_bytes(backend: str) -> int:
    """Return what the framework takes on a backend before the first tensor."""
    row = find_backend(backend)
    return row.framework_bytes if row is not None else CONTEXT_BYTES


class MemoryCost:
    """Bytes of parts of the model, for one optimizer and dtype."""

    def __init__(
        self, profile: Profile, optimizer: str = "adamw", dtype: str | None = None, *, staleness: int = 0
    ) -> None:
        """Reckon by a profile; with weights that are so many steps old, there are as many sets of them more.

        Each set has weights and gradients of its own, the optimizer's state is one (`schedule.dispatch.policies`).
        """
        if optimizer not in STATE_COPIES:
            raise ValueError(f"optimizer must be one of {', '.join(STATE_COPIES)}, got {optimizer!r}")
        self._profile = profile
        # Autocast keeps float32 master weights and gradients, and a 16-bit copy of the weights beside them.
        self._dtype = dtype or profile.dtype
        self._rounded = 0.5 if is_low(self._dtype) else 0.0
        self._sets = 1 + staleness
        self._optimizer_ratio = STATE_COPIES[optimizer]

        self.fewest_samples = cache(profile.graph.fewest_samples)
        """Of units, at once (`UnitGraph.fewest_samples`)."""
        self._held = cache(profile.graph.held_parameter_bytes)
        self._shared_within = cache(profile.graph.shared_within_bytes)
        self._trained = cache(profile.graph.held_trained_bytes)
        self._gathered = cache(profile.graph.gathered_bytes)
        self._activations = cache(profile.graph.stage_held_bytes)
        self._deferred = cache(profile.graph.stage_deferred_bytes)
        self._working = cache(profile.graph.stage_working_bytes)
        self._needs = cache(self._need_on)

    def state_bytes(self, units: Sequence[int], division: Division = WHOLE) -> int:
        """Return the bytes of parameters, gradients and optimizer state; shared parameters of a stage once."""
        return sum(self._state_parts(units, division))

    def state_bytes_of(
        self, parameter_bytes: NDArray[np.float64], trained_bytes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the bytes of state for so many bytes of parameters, of which so many are trained, undivided."""
        own = np.ceil(trained_bytes * self._optimizer_ratio) + self._sets * trained_bytes
        copied = trained_bytes if self._dtype == LOW_WEIGHTS else parameter_bytes  # what is frozen is of 16 bits then
        more = (1 + self._rounded) * (self._sets - 1) * trained_bytes
        return np.asarray(np.ceil(parameter_bytes + self._rounded * copied + more) + own)

    def _state_parts(self, units: Sequence[int], division: Division) -> tuple[int, int, int]:
        """Return the bytes of parameters, gradients and optimizer state."""
        held, each = self._held(units, division.tp_share), self._trained(units, division.tp_share)
        trained, sharding = sum(each), division.state_sharding
        offloads = sharding is StateSharding.OFFLOAD
        part = 0.0 if offloads else 1.0 if sharding is StateSharding.NONE else 1 / division.replicas
        gradient_bytes = self._sets * trained
        if offloads or (sharding.divides_gradients and division.replicas > 1):
            gradient_bytes = self._sets * math.ceil(trained * part) + 2 * max(each)
        optimizer_bytes = math.ceil(trained * part * self._optimizer_ratio)
        parameter_bytes = sum(held) + (1 + self._rounded) * (self._sets - 1) * trained
        parameter_bytes += self._rounded * (trained if self._dtype == LOW_WEIGHTS else sum(held))
        if offloads or (sharding is StateSharding.ZERO3 and division.replicas > 1):
            ratio, copies = gathered_ratio(self._dtype), 0.0 if self._dtype == LOW_WEIGHTS else self._rounded
            at_work = 2 * max(self._gathered(units, ratio, division.tp_share)) + ratio * self._shared_within(units)
            parameter_bytes = sum(held) * part + copies * sum(held) + at_work
        return math.ceil(parameter_bytes), gradient_bytes, optimizer_bytes

    def host_bytes(self, stage: Stage) -> int:
        """Return the bytes that a stage offloads to its host's memory."""
        if not stage.offloads:
            return 0
        trained = sum(self._trained(stage.units, ALONE))
        return sum(self._held(stage.units, ALONE)) + trained + math.ceil(trained * self._optimizer_ratio)

    def activation_bytes_per_sample(self, units: range, division: Division = WHOLE) -> int:
        """Return the bytes held for one sample in flight, from F to I or B."""
        return self._activations(units, division.tp_share, division.recompute)

    def in_flight_bytes_per_sample(self, units: range, division: Division = WHOLE) -> int:
        """Return the most bytes held for one sample in flight: from F to I or B, or from I to W where W is put off."""
        held = self.activation_bytes_per_sample(units, division)
        if not division.splits or units.start == 0:
            return held
        return max(held, self._deferred(units, division.tp_share, division.recompute))

    def buffer_bytes_per_sample(self, units: range, division: Division = WHOLE) -> int:
        """Return the bytes of messages for one sample of a micro-batch: both cuts, both directions."""
        graph = self._profile.graph.units
        edges = [(graph[units.start - 1], division.wire_before)] if units.start > 0 else []
        if units.stop < len(graph):
            edges.append((graph[units.stop - 1], division.wire_behind))
        per_sample = sum(unit.forward_bytes(wire) + unit.backward_bytes(wire) for unit, wire in edges)
        return BUFFERED_MICRO_BATCHES * per_sample

    def need(
        self, units: range, device: str, in_flight: int, largest_span: int, division: Division = WHOLE
    ) -> MemoryNeed:
        """Return what a device needs for a stage's units, with so many samples in flight."""
        backend = self._profile.cluster.device_by_name[device].backend
        return self._needs(units, backend, in_flight, largest_span, division)

    def _need_on(self, units: range, backend: str, in_flight: int, largest_span: int, division: Division) -> MemoryNeed:
        per_sample = self.in_flight_bytes_per_sample(units, division)
        # The first stage goes back at once: nothing waits for W behind what is run again.
        splits = division.splits and units.start > 0
        again = self._profile.graph.stage_again_bytes(units, division.tp_share, division.recompute, splits=splits)
        # The span whose units are run again holds, beside them, what it holds from F to I.
        again = max(0, self.activation_bytes_per_sample(units, division) + again - per_sample)
        by_sample, besides = self._working(units, division.tp_share)
        return MemoryNeed(
            state_bytes=self.state_bytes(units, division),
            activation_bytes=in_flight * per_sample + largest_span * again,
            buffer_bytes=largest_span * self.buffer_bytes_per_sample(units, division),
            working_bytes=largest_span * by_sample + besides,
            framework_bytes=framework_bytes(backend),
        )

    def held_sizes(self, units: range, device: str, division: Division = WHOLE) -> HeldSizes:
        """Return the sizes of what a device holds for a stage's units, for memory over time."""
        whole, graph = self._profile.graph, self._profile.graph.units
        part = (units, division.tp_share, division.recompute)
        parameter_bytes, gradient_bytes, optimizer_bytes = self._state_parts(units, division)
        last, before = units.stop == len(graph), graph[units.start - 1]
        by_sample, besides = self._working(units, division.tp_share)
        return HeldSizes(
            always=HeldBytes(
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradient_bytes,
                optimizer_bytes=optimizer_bytes,
                framework_bytes=framework_bytes(self._profile.cluster.device_by_name[device].backend),
            ),
            activation_bytes_per_sample=self.activation_bytes_per_sample(units, division),
            input_bytes_per_sample=before.forward_bytes(division.wire_before) if units.start > 0 else 0,
            output_gradient_bytes_per_sample=(
                0 if last else graph[units.stop - 1].backward_bytes(division.wire_behind)
            ),
            deferred_bytes_per_sample=self._deferred(*part),
            again_bytes_per_sample=whole.stage_again_bytes(*part, splits=False),
            again_split_bytes_per_sample=whole.stage_again_bytes(*part),
            working_bytes_per_sample=by_sample,
            working_bytes=besides,
            keeps_input=division.wire_before is WireFormat.NATIVE,
            keeps_output=division.wire_behind is WireFormat.NATIVE and units.stop - 1 not in division.recompute,
        )

    def plan_held_sizes(self, plan: Plan) -> dict[str, HeldSizes]:
        """Return the sizes of what every device of a plan holds."""
        divisions = stage_divisions(plan)
        return {device: self._crew_sizes(crew, device, divisions) for crew in plan.crews for device in crew.devices}

    def _crew_sizes(self, crew: Crew, device: str, divisions: Mapping[tuple[int, str], Division]) -> HeldSizes:
        """Return the sizes of what one of a crew's devices holds; what it hands to its own next stage is no message."""
        own = {}
        for number, stage in zip(crew.numbers, crew.stages, strict=True):
            sizes = self.held_sizes(stage.units, device, divisions[number, device])
            if number - 1 in crew.numbers:
                sizes = replace(sizes, input_bytes_per_sample=0)
            own[number] = replace(sizes, output_gradient_bytes_per_sample=0) if number + 1 in crew.numbers else sizes
        first = own[crew.numbers[0]]
        if not crew.several:
            return first
        parameter_bytes, gradient_bytes, optimizer_bytes = self._state_parts(crew.units, WHOLE)
        always = replace(
            first.always,
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
        )
        return replace(first, always=always, stages=own)

    def in_flight_limit_for(
        self,
        units: range,
        device: str,
        share_samples: int,
        largest_span: int,
        *,
        limit_bytes: int | None = None,
        division: Division = WHOLE,
    ) -> int:
        """Return how many samples may be in flight: what fits, at most the replica's share of the global batch.

        0 when not even the parameters fit; a limit under `largest_span` means that the plan cannot run. `limit_bytes`
        stands for a device with less memory than it has. A group may hold what its least member may.
        """
        have = self._profile.cluster.device_by_name[device].memory_bytes
        left = have if limit_bytes is None else min(have, limit_bytes)
        left -= self.need(units, device, 0, largest_span, division).peak_bytes
        per_sample = self.in_flight_bytes_per_sample(units, division)
        if left < 0:
            return 0
        return share_samples if per_sample == 0 else min(share_samples, left // per_sample)

    def limit_in(
        self, stage: Stage, number: int, divisions: Mapping[str, Division], *,
        steps: int = 1, limit_bytes: int | None = None,
    ) -> int:  # fmt: skip
        """Return the same for a replica, by what its devices have of the stage; with the samples of so many steps."""
        samples, largest = steps * stage.samples_of(number), stage.largest_of(number)
        return min(
            self.in_flight_limit_for(
                stage.units, name, samples, largest, limit_bytes=limit_bytes, division=divisions[name]
            )
            for name in stage.replicas[number].devices
        )

    def plan_peak_bytes(self, plan: Plan) -> dict[str, int]:
        """Return the peak bytes of every device of a plan, at its in-flight limits.

        Of a device with several stages, at what its order of work holds of them at once, where that is known; it never
        holds more (`schedule.dispatch.several.InOrder`).
        """
        peaks, divisions = {}, stage_divisions(plan)
        for number, stage in enumerate(plan.stages if not plan.interleaved else ()):
            for index, replica in enumerate(stage.replicas):
                for device in replica.devices:
                    peaks[device] = self._stage_need(stage, index, device, divisions[number, device]).peak_bytes
        if plan.interleaved:
            for crew, row in zip(plan.crews, replica_tasks(plan), strict=True):
                for index, task in enumerate(row):
                    device = crew.first.replicas[index].devices[0]
                    peaks[device] = self._crew_need(crew, index, task, divisions).peak_bytes
        for crew in plan.crews:
            for device in crew.first.keepers:
                peaks[device] += self.state_bytes(crew.units)
        return peaks

    def crew_sizes(self, plan: Plan) -> dict[str, tuple[int, dict[int, int]]]:
        """Return, by leader of a replica, all bytes but those in flight, and bytes in flight of a sample by stage."""
        divisions, found = stage_divisions(plan), {}
        for crew, row in zip(plan.crews, replica_tasks(replace(plan, hints=None)), strict=True):
            for index, task in enumerate(row):
                device = crew.first.replicas[index].devices[0]
                need = self._crew_need(crew, index, task, divisions)
                found[device] = (
                    need.peak_bytes - need.activation_bytes,
                    {
                        number: self.in_flight_bytes_per_sample(stage.units, divisions[number, device])
                        for number, stage in zip(crew.numbers, crew.stages, strict=True)
                    },
                )
        return found

    def _stage_need(self, stage: Stage, index: int, device: str, division: Division) -> MemoryNeed:
        in_flight = min(stage.replicas[index].in_flight_limit, stage.samples_of(index))
        return self.need(stage.units, device, in_flight, stage.largest_of(index), division)

    def _crew_need(
        self, crew: Crew, index: int, task: Task, divisions: Mapping[tuple[int, str], Division]
    ) -> MemoryNeed:
        """Return what the device of a crew's replica needs for all of its stages."""
        device, order = crew.first.replicas[index].devices[0], known_order(task)
        own = [
            (number, stage, divisions[number, device]) for number, stage in zip(crew.numbers, crew.stages, strict=True)
        ]
        needs = [self._stage_need(stage, index, device, division) for _, stage, division in own]
        held = sum(need.activation_bytes for need in needs)
        if order:
            sizes = {number: self.in_flight_bytes_per_sample(stage.units, part) for number, stage, part in own}
            held = min(held, most_held_bytes(order, sizes))
        return MemoryNeed(
            state_bytes=self.state_bytes(crew.units),
            activation_bytes=held,
            buffer_bytes=sum(need.buffer_bytes for need in needs),
            working_bytes=max(need.working_bytes for need in needs),
            framework_bytes=needs[0].framework_bytes,
        )


def most_held_bytes(order: Iterable[Action], per_sample: Mapping[int, int]) -> int:
    """Return the most bytes in flight at once in an order, by the bytes of a sample in each stage.

    >>> order = [Action.parse(text) for text in ("0F[0:2]", "2F[0:2]", "2B[0:2]", "0F[2:4]", "0B[0:2]")]
    >>> most_held_bytes(order, {0: 10, 2: 100})
    220
    """
    held = most = 0
    for action in order:
        size_bytes = action.span.size * per_sample[action.stage]
        if action.op is Op.FORWARD:
            held += size_bytes
            most = max(most, held)
        elif action.op is not Op.BACKWARD_INPUT:
            held -= size_bytes
    return most
