"""Normalizations by the statistics of micro-batches: losses, weights and running statistics of one device with the same
micro-batches, under any plan, order of work, recomputation and change of plan.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from preloaded import spawn
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span
from spantrain.errors import PlanError
from spantrain.models.build import unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.dataset import open_dataset
from spantrain.models.statistics import named_statistics, trained_norms
from spantrain.models.units import LABELS, rows_read
from spantrain.runtime.checkpoint.tensor_file import step_folder
from spantrain.runtime.step.work import SampledFeed
from spantrain.schedule.joint import check_joint, statistics_spans
from spantrain.schedule.registry import schedule_names, schedules
from testing.models.graphs import graph_of
from testing.models.zoo.trial import FOLDER
from testing.runtime.gloo_statistics import Order, device, normalization
from testing.runtime.parts import put
from testing.runtime.runs import OldWeights, OneProcess
from testing.runtime.sessions import Ran, train_in_threads

BATCH = 6
JOB = TrainJob(
    steps=3, seed=5, optimizer="sgd", learning_rate=0.02, warmup_steps=2, max_grad_norm=0.5, batch_norm="micro-batch"
)
THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
SPANS = [THIRDS, [Span(0, 3), Span(3, 6)], [Span(0, 2), Span(2, 6)]]


class InMicroBatches(OneProcess):
    """Plain PyTorch, whose normalizations train: each stage's units run on the stage's micro-batches, one by one."""

    plan_at: Callable[[int], Plan]
    """The plan of a step."""

    @property
    def norms(self):
        return trained_norms(self.units)

    def _backward(self, step: int, feed: SampledFeed) -> float:
        plan = self.plan_at(step)
        for norm in self.norms:
            norm.training = True
        tensors: tuple[torch.Tensor, ...] = ()
        for stage in plan.stages:
            units = self.units[stage.first_unit : stage.end_unit]
            spans = statistics_spans(stage, joined=self.job.joins_statistics)
            parts = [self._run(units, feed, step, span, tensors) for span in spans]
            tensors = tuple(map(torch.cat, zip(*parts, strict=True)))
        for norm in self.norms:
            norm.training = False
        loss = tensors[0].sum() / plan.global_batch
        loss.backward()
        return float(loss.detach())

    def _run(self, units, feed: SampledFeed, step: int, span: Span, tensors) -> tuple[torch.Tensor, ...]:
        rows = feed.rows(step, span, rows_read(units))
        own = tuple(tensor[span.lo : span.hi] for tensor in tensors)
        for unit in units:
            own = unit.run(own, rows)
        return (own.reshape(1),) if LABELS in units[-1].reads else own

    def held_out(self) -> float:
        feed = SampledFeed(
            open_dataset(self.spec, held_out=True), global_batch=self.global_batch, seed=self.job.seed,
            same_every_step=True,
        )  # fmt: skip
        with torch.no_grad():
            (loss,) = self._run(self.units, feed, 0, Span(0, self.global_batch), ())
        return float(loss) / self.global_batch

    def statistics(self) -> dict[str, torch.Tensor]:
        return named_statistics(self.units)


class OldInMicroBatches(OldWeights, InMicroBatches):
    """The same with weights one step old."""


def wanted(job: TrainJob, plan: Plan, changes: dict[int, Plan] | None = None) -> tuple[list[float], InMicroBatches]:
    """Losses of one process; a change behind a step is of the steps that follow."""

    def plan_at(step: int) -> Plan:
        return next((changed for at, changed in sorted((changes or {}).items(), reverse=True) if step > at), plan)

    process = (OldInMicroBatches if job.staleness else InMicroBatches)(plan.model, job, plan.global_batch)
    process.plan_at = plan_at
    return process.train(0, job.steps), process


def check(ran: Ran, losses: list[float], process: InMicroBatches, tolerance: float = 1e-4) -> None:
    assert ran.losses == pytest.approx(losses, rel=tolerance)
    want = process.statistics()
    seen = {}
    for session in ran.sessions.values():
        holding = session._part.holding
        for name, tensor in holding.statistics.items():
            seen[name] = seen.get(name, want[name].clone())
            put(seen[name], holding.parts[name], tensor)
            assert torch.allclose(seen[name], want[name], rtol=tolerance, atol=tolerance), name
    assert seen.keys() == want.keys()
    assert all(int(tensor) > 0 for name, tensor in want.items() if name.endswith("num_batches_tracked"))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan(data, plans):
    plan = data.draw(plans(("resnet", "efficientnet")))
    stages = []
    for stage in plan.stages:
        again = data.draw(st.sets(st.sampled_from(sorted(stage.units)), max_size=2))
        stages.append(replace(stage, recompute=tuple(sorted(again))))
    plan = replace(plan, stages=tuple(stages))
    check(train_in_threads(plan, JOB), *wanted(JOB, plan))


@pytest.fixture(scope="module")
def plan(make_plan, spec_of) -> Plan:
    """Three stages, two unequal replicas in the middle."""
    return make_plan(spec_of("resnet"), [0, 2, 4, 5], [[1], [2, 1], [1]], SPANS, "critical-path")


@pytest.mark.parametrize("schedule", schedule_names())
def test_any_order_of_work_gives_the_same(schedule, plan):
    even = replace(plan, stages=tuple(replace(stage, micro_batches=tuple(THIRDS)) for stage in plan.stages))
    losses, process = wanted(JOB, even)
    check(train_in_threads(replace(even, schedule=schedule), JOB), losses, process, 1e-5)


JOINED = replace(JOB, batch_norm="replicas")
STATIC = [name for name, schedule in schedules().items() if schedule.orders]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan_with_statistics_of_all_replicas(data, plans):
    """Or it is refused before anything waits."""
    plan = replace(
        data.draw(plans(("resnet", "efficientnet"))), schedule=data.draw(st.sampled_from(STATIC)), hints=None
    )
    stages = []
    for stage in plan.stages:
        again = data.draw(st.sets(st.sampled_from(sorted(stage.units)), max_size=2))
        stages.append(replace(stage, recompute=tuple(sorted(again))))
    plan = replace(plan, stages=tuple(stages))
    try:
        check_joint(plan, graph_of(plan.model), statistics=True)
    except PlanError as error:
        event(str(error).split(":")[1][:30])
        with pytest.raises(PlanError, match="batch_norm replicas"):
            train_in_threads(plan, JOINED)
        return
    event(f"ran, {max(len(stage.replicas) for stage in plan.stages)} replicas")
    check(train_in_threads(plan, JOINED), *wanted(JOINED, plan))


@pytest.mark.parametrize("schedule", STATIC)
def test_statistics_of_all_replicas_are_those_of_the_whole_micro_batch(schedule, plan):
    plan = replace(plan, schedule=schedule)
    losses, process = wanted(JOINED, plan)
    check(train_in_threads(plan, JOINED), losses, process, 1e-5)
    assert losses != pytest.approx(wanted(JOB, plan)[0], rel=1e-4)


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if name not in STATIC])
def test_replicas_that_would_wait_for_ever_are_refused(schedule, plan):
    with pytest.raises(PlanError, match=rf"schedule {schedule} decides at run time .* stage 1 .* --schedule .*gpipe"):
        train_in_threads(replace(plan, schedule=schedule), JOINED)


ONE = [Span(0, 6)]
UNEVEN = [[Span(0, 3), Span(3, 4), Span(4, 6)], THIRDS, [Span(0, 1), Span(1, 5), Span(5, 6)]]


@pytest.mark.parametrize(
    ("schedule", "shares", "limits", "spans", "why"),
    [
        ("zb-h1", (1.0, 1.0), (6, 1), [ONE, THIRDS, THIRDS], "s1r1 and s1r0 .* unlike orders"),
        ("1f1b", (1.0, 1.0), (6, 6), UNEVEN, "order stops: .*0B.* waits for output_gradient of stage 1"),
        ("gpipe", (5.0, 1.0), (6, 6), [THIRDS] * 3, "s1r1 has no samples in 3 of the 3 micro-batches of stage 1"),
    ],
    ids=["orders", "micro-batches", "shares"],
)
def test_orders_that_would_stop_are_refused(schedule, shares, limits, spans, why, plan):
    """They run where replicas of a stage do not wait for each other."""
    replicas = [
        replace(replica, sample_share=share, in_flight_limit=limit)
        for replica, share, limit in zip(plan.stages[1].replicas, shares, limits, strict=True)
    ]
    stages = [replace(stage, micro_batches=tuple(own)) for stage, own in zip(plan.stages, spans, strict=True)]
    stages[1] = replace(stages[1], replicas=tuple(replicas))
    with pytest.raises(PlanError, match=why):
        check_joint(replace(plan, stages=tuple(stages), schedule=schedule), graph_of(plan.model), statistics=True)


def placed(plan: Plan, edges: list[int], groups: list[list[list[str]]]) -> Plan:
    """The plan on other devices: their names by stage and replica; replicas of several divide tensors."""
    names = sorted(name for stage in groups for replica in stage for name in replica)
    cluster = plan.cluster
    devices = tuple(replace(cluster.devices[0], name=name) for name in names)
    host = replace(cluster.hosts[0], devices=tuple(names))
    stages = tuple(
        Stage(
            first_unit=edges[index],
            end_unit=edges[index + 1],
            replicas=tuple(
                Replica(
                    devices=tuple(members),
                    sample_share=1.0,
                    in_flight_limit=BATCH,
                    tp_shares=tuple(float(1 + place) for place in range(len(members))),
                )
                for members in stage
            ),
            micro_batches=tuple(SPANS[index % len(SPANS)]),
        )
        for index, stage in enumerate(groups)
    )
    return replace(plan, cluster=replace(cluster, hosts=(host,), devices=devices), stages=stages)


LAYOUTS = {
    "unlike replicas": ([0, 2, 4, 5], [[["a"]], [["b"], ["c"]], [["d"]]]),
    "other units": ([0, 1, 3, 5], [[["b"]], [["a"], ["d"]], [["c"]]]),
    "members that divide tensors": ([0, 2, 5], [[["a", "c"]], [["d", "b"]]]),
    "replicas of unlike groups": ([0, 4, 5], [[["a", "c"], ["b"]], [["d"]]]),
}


@pytest.mark.parametrize("then", LAYOUTS)
def test_statistics_of_all_replicas_under_plans_that_change(then, plan):
    """Members of groups that divide channels, and others that do not, in one stage."""
    before, after = (replace(placed(plan, *LAYOUTS[name]), schedule="1f1b") for name in ("other units", then))
    losses, process = wanted(JOINED, before, {0: after})
    check(train_in_threads(before, JOINED, {0: after}), losses, process)


@pytest.mark.parametrize(
    ("first", "then"),
    [("unlike replicas", then) for then in list(LAYOUTS)[1:]] + [("other units", then) for then in list(LAYOUTS)[::3]],
)
def test_running_statistics_move_with_their_units(first, then, plan):
    before, after = placed(plan, *LAYOUTS[first]), placed(plan, *LAYOUTS[then])
    job = replace(JOB, evaluate_every=3)
    losses, process = wanted(job, before, {0: after})
    ran = train_in_threads(before, job, {0: after})
    check(ran, losses, process)
    assert ran.held_out[-1] == pytest.approx(process.held_out(), rel=1e-4)


def test_a_run_goes_on_with_the_statistics_of_its_checkpoint(plan, tmp_path):
    job = replace(JOB, checkpoint_every=2, steps=4)
    losses, process = wanted(job, plan)
    check(train_in_threads(plan, job, out=tmp_path), losses, process)
    (manifest,) = [one for one in train_in_threads(plan, job, out=tmp_path / "b").manifests if one.step == 2]
    folder = step_folder(tmp_path / "b" / "checkpoint", 2)
    again = train_in_threads(replace(plan, generation=9), job, content=manifest.content, folder=folder)
    check(again, losses[2:], process)


def test_overlapping_steps_have_one_set_of_statistics(plan):
    job = replace(JOB, steps=5, staleness=1, adapter="off")
    check(train_in_threads(plan, job), *wanted(job, plan))


def test_frozen_statistics_stay(plan):
    ran = train_in_threads(plan, replace(JOB, batch_norm="frozen"))
    for session in ran.sessions.values():
        for name, tensor in session._part.holding.statistics.items():
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("running_var")))), name


def test_processes_joined_by_gloo_normalize_as_one(plan, tmp_path):
    """As torch's BatchNorm over all rows, while sums of gradients are under way in a group beside it."""
    replicas = tuple(
        Replica(devices=(name,), sample_share=share, in_flight_limit=BATCH)
        for name, share in (("s1r0", 2.0), ("s1r1", 1.0))
    )
    stage = Stage(first_unit=0, end_unit=5, replicas=replicas, micro_batches=(Span(0, BATCH),))
    order = Order(plan=replace(plan, stages=(stage,)), rows=3 * torch.randn(BATCH, 5, 4, 3) + 7, folder=tmp_path)
    spawn(device, args=(order,), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    norm, given = normalization().body.train(), order.rows.clone().requires_grad_()
    wanted = norm(given)
    wanted.square().sum().backward()
    for got, want in zip(("found", "given"), (wanted, given.grad), strict=True):
        assert torch.allclose(torch.cat([one[got] for one in found]), want, rtol=1e-4, atol=1e-5), got
    for one in found:
        assert one["sums"] == 2.0
        for name, want in (dict(norm.named_buffers()) | {name: p.grad for name, p in norm.named_parameters()}).items():
            assert torch.allclose(one[f"body.{name}"].to(want.dtype), want, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("plain.contrastive_by_kinds", "1f1b"),
        ("plain.contrastive_by_kinds", "critical-path"),
        ("plain.branches_on_a_batch", "critical-path"),
        ("decoders.mixtral_balanced", "1f1b"),
    ],
)
def test_samples_that_depend_on_each_other_are_those_of_a_micro_batch(name, schedule, make_plan):
    family, _, function = name.partition(".")
    spec = resolve_model(f"{FOLDER / family}.py:{function}")
    plan = make_plan(spec, [0, 2, 3, unit_count(spec)], [[1], [2, 1], [1]], SPANS, schedule)
    check(train_in_threads(plan, JOB), *wanted(JOB, plan))
