"""Tensor-parallel replicas give the gradients of one device: leaders, followers, messages and sums, in threads."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spantrain.core.job import TrainJob
from spantrain.core.plan import GradientSums, Plan
from spantrain.core.span import Span
from spantrain.errors import ConfigError, Interrupted
from spantrain.formats.registry import WireFormat
from spantrain.models.build import build_units, unit_count
from spantrain.models.data.dataset import open_dataset
from spantrain.models.randomness.draws import DrawnSamples
from spantrain.models.tensor_parallel.division import put
from spantrain.models.units import loss_of, rows_read
from spantrain.runtime.gradients.stage_sums import StageSum, TiedGradientSums, tied_across_stages
from spantrain.runtime.recorder import StepRecorder
from spantrain.runtime.step.stage_member import StageMember, build_member
from spantrain.runtime.step.work import SampledFeed
from spantrain.runtime.worker.plan_part import StageActions
from testing.memory_mailbox import MemoryNetwork
from testing.models.graphs import graph_of
from testing.models.library_models import library_spec
from testing.patience import PATIENCE_S
from testing.runtime.groups import divided, random_groups
from testing.runtime.runs import context_of
from testing.runtime.thread_groups import ThreadMembers, thread_groups

pytestmark = pytest.mark.tensor_parallel

SEED, DRAWS = 3, 11
TOLERANCE = 1e-5
FLOOR = 1e-4
"""Gradients this much smaller than the largest are rounding (the key bias of attention has none at all)."""

SUMS = GradientSums(bucket_bytes=2**11, first_bucket_bytes=2**9)
"""Several buckets, the first of them while the last backward goes on."""

RANDOM = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}
"""Nothing is made smaller: a plan that fails is small enough to look at, and each takes a second."""


@dataclass(kw_only=True)
class Ran:
    """One device after a step."""

    member: StageMember
    loss_sum: float | None
    evaluation: float | None
    square: float | None
    held: int


class Cast:
    """The devices of a plan: their mailboxes, groups and units."""

    def __init__(self, plan: Plan) -> None:
        network = MemoryNetwork()
        self.plan = plan
        self.mailboxes = {name: network.mailbox(name) for name in plan.devices}
        self._groups = {name: found for stage in plan.stages for name, found in thread_groups(stage).items()}
        self._data, self._graph = open_dataset(plan.model), graph_of(plan.model)
        # Here, since torch's random numbers belong to all threads.
        self._units = {
            name: build_units(plan.model, stage.units, seed=SEED) for stage in plan.stages for name in stage.devices
        }
        self._failed = threading.Event()

    def _check_abort(self) -> None:
        if self._failed.is_set():
            raise Interrupted("another device failed")

    def play_or_leave(self, name: str) -> Ran:
        """Have nobody wait for a device that failed."""
        finished = False
        try:
            ran = self._play(name)
            finished = True
            return ran
        finally:
            if not finished:
                self._failed.set()
                for group in (self._groups[name].world, self._groups[name].replica, self._groups[name].ring):
                    if isinstance(group, ThreadMembers):
                        group.leave()

    def _play(self, name: str) -> Ran:
        torch.set_num_threads(1)
        plan, recorder = self.plan, StepRecorder(name)
        self.mailboxes[name].set_peers(plan.generation, [box.address for box in self.mailboxes.values()])
        feed = SampledFeed(self._data, global_batch=plan.global_batch, seed=SEED)
        job = TrainJob(steps=1, seed=DRAWS)
        here = context_of(
            name, self.mailboxes[name], feed, recorder, check_abort=self._check_abort, graph=self._graph, job=job
        )
        member = build_member(here, plan, self._units[name], self._groups[name])
        actions = StageActions(here, plan, member)
        evaluation = actions.evaluate(0, feed)
        stage_sum = StageSum(member.groups, member.parts, levels=True, partial=member.partial, sums=SUMS)
        sums = stage_sum.begin(member.named_parameters)
        loss_sum = actions.run_step(0, sums.final)
        sums.finish(self._check_abort)
        square = self._sum_tied(member, actions, stage_sum, recorder)
        stage_sum.close()
        held = recorder.figures.peak_held_samples
        return Ran(member=member, loss_sum=loss_sum, evaluation=evaluation, square=square, held=held)

    def _sum_tied(
        self, member: StageMember, actions: StageActions, stage_sum: StageSum, recorder: StepRecorder
    ) -> float | None:
        """Do what follows the stage's own sums; return the device's part of the squared norm."""
        parameters = member.named_parameters
        tied = TiedGradientSums(
            tied=tied_across_stages(self.plan, member.stage_index, self._graph, member.units),
            plan=self.plan,
            stage_index=member.stage_index,
            driver=actions.driver,
            stage_sum=stage_sum,
            recorder=recorder,
        )
        tied.run(0, parameters)
        return stage_sum.square(parameters, leave_out=tied.counted_elsewhere)


def run_step(plan: Plan) -> dict[str, Ran]:
    """An evaluation and a step of all devices, with the sums at its end."""
    cast = Cast(plan)
    with ThreadPoolExecutor(len(plan.devices)) as pool:
        futures = {name: pool.submit(cast.play_or_leave, name) for name in plan.devices}
        wait(futures.values(), PATIENCE_S)
        errors = [error for future in futures.values() if (error := future.exception(0)) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, (threading.BrokenBarrierError, Interrupted))):
        raise error
    for mailbox in cast.mailboxes.values():
        mailbox.close()
    return {name: future.result() for name, future in futures.items()}


def whole_gradients(ran: list[Ran]) -> dict[str, torch.Tensor]:
    """The gradients of a replica's members, put together; what they hold whole is the same on all of them."""
    found: dict[str, torch.Tensor] = {}
    for one in ran:
        for name, parameter in one.member.named_parameters.items():
            part = one.member.parts.own[name]
            assert parameter.shape == part.shape, name
            if part.is_whole and name in found:
                assert torch.equal(found[name], parameter.grad), name
            found.setdefault(name, torch.full(part.full_shape, math.nan))
            put(found[name], part, parameter.grad)
    return found


def check(plan: Plan, reference) -> None:
    ran = run_step(plan)
    units, parameters = reference(plan.model, SEED)
    feed = SampledFeed(open_dataset(plan.model), global_batch=plan.global_batch, seed=SEED)
    whole = Span(0, plan.global_batch)
    rows, samples = feed.rows(0, whole, rows_read(units)), DrawnSamples(seed=DRAWS, step=0, first=0, count=whole.size)
    with torch.no_grad():
        evaluation = loss_of(units, rows)
    loss = loss_of(units, rows, samples)
    (loss / plan.global_batch).backward()
    for figure, wanted in (("loss_sum", loss), ("evaluation", evaluation)):
        total = sum(getattr(one, figure) or 0.0 for one in ran.values())
        assert total == pytest.approx(float(wanted.detach()), rel=TOLERANCE), figure
    distinct = {id(parameter): parameter for parameter in parameters.values()}.values()
    largest = max(float(parameter.grad.norm()) for parameter in distinct)
    for stage in plan.stages:
        for replica in stage.replicas:
            for name, got in whole_gradients([ran[device] for device in replica.devices]).items():
                want = parameters[name].grad
                error = float((got - want).norm())
                assert error <= TOLERANCE * max(float(want.norm()), FLOOR * largest), (replica.devices, name, error)
            assert all(ran[device].held <= replica.in_flight_limit for device in replica.devices)
    norm = math.sqrt(sum(one.square or 0.0 for one in ran.values()))
    wanted = math.sqrt(sum(float(parameter.grad.double().square().sum()) for parameter in distinct))
    assert norm == pytest.approx(wanted, rel=TOLERANCE)


@settings(max_examples=12, **RANDOM)
@given(data=st.data())
def test_random_plans_of_text_models(data, plans, reference):
    plan = data.draw(plans(("gpt2", "bert")))
    slices = data.draw(st.frozensets(st.integers(0, len(plan.stages) - 1)), "stages with slices of the sequence")
    check(divided(plan, data.draw(random_groups(plan)), slices), reference)


@settings(max_examples=5, **RANDOM)
@given(data=st.data())
def test_random_plans_of_image_models(data, plans, reference):
    plan = data.draw(plans(("resnet", "efficientnet")))
    check(divided(plan, data.draw(random_groups(plan))), reference)


THIRDS = [Span(0, 3), Span(3, 6), Span(6, 9)]


GROUPS = {
    "alike": [[[1, 2], [1, 2]], [[1]]],  # figure 7c of the paper: the k-th members sum
    "degrees": [[[1], [1, 1]], [[1, 1]]],  # another degree in each replica: leaders sum
    "shares": [[[2, 1], [1, 2]], [[1, 1]]],  # the same degree in other shares
}
WHOLE, SLICES = frozenset[int](), frozenset({0, 1})


@pytest.mark.parametrize(
    ("groups", "schedule", "slices"),
    [
        ("alike", "1f1b", WHOLE),
        ("alike", "critical-path", SLICES),
        ("degrees", "1f1b", SLICES),
        ("degrees", "critical-path", WHOLE),
        ("shares", "1f1b", SLICES),
        ("shares", "critical-path", WHOLE),
    ],
)
def test_replicas_of_unequal_samples_and_tensors(groups, schedule, slices, make_plan, spec_of, reference):
    """The first replica takes a third of the samples; the embedding is tied to the head of the other stage."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1, 2], [1]], [THIRDS, THIRDS], schedule)
    check(divided(plan, GROUPS[groups], slices), reference)


@pytest.mark.parametrize("slices", [frozenset(), frozenset({0, 2})], ids=["whole", "slices"])
def test_stages_make_a_bias_of_positions_themselves(slices, make_plan, reference, tmp_path):
    """T5's, of parameters alone: three stages share its table, whose gradient is summed over them."""
    spec = library_spec("t5", tmp_path)
    assert len(graph_of(spec).units[1].outputs) == 1, "behind the first block: what it made of what it read"
    plan = make_plan(spec, [0, 2, 4, 6], [[1], [1, 2], [1]], [THIRDS, THIRDS, THIRDS], "critical-path")
    check(divided(plan, [[[1, 1]], [[1], [1, 1]], [[2, 1]]], slices), reference)


def test_a_model_without_a_sequence_to_slice_is_refused_by_name(make_plan, spec_of):
    plan = make_plan(spec_of("resnet"), [0, unit_count(spec_of("resnet"))], [[1]], [THIRDS], "gpipe")
    with pytest.raises(ConfigError, match=r"stage 0: sequence_parallel, but no unit of .* leave it out"):
        run_step(divided(plan, [[[1, 1]]], frozenset({0})))


@pytest.mark.parametrize("wire_format", [WireFormat.BFLOAT16, WireFormat.INT8])
def test_divided_by_leaders_and_rounded_on_the_cut(wire_format, make_plan, spec_of):
    """A cut is rounded once, by leaders: all members go on with the same numbers."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [THIRDS, THIRDS], "critical-path")
    first, last = plan.stages
    rounded = replace(plan, stages=(replace(first, wire_format=wire_format), last))
    exact = run_step(divided(plan, [[[1, 2]], [[2, 1]]]))
    close = run_step(divided(rounded, [[[1, 2]], [[2, 1]]]))
    assert exact["s1r0t0"].loss_sum != close["s1r0t0"].loss_sum
    assert close["s1r0t0"].loss_sum == pytest.approx(exact["s1r0t0"].loss_sum, rel=1e-2)
    whole_gradients([close["s1r0t0"], close["s1r0t1"]])
