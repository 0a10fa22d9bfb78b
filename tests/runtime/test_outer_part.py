"""A pipeline as one cluster of the outer optimizer: devices are threads, master and shards are real."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from spantrain.core.job import TrainJob
from spantrain.core.outer.layers import group_layers
from spantrain.core.outer.stages import OuterCluster, StageMeeting, StageOrder, StageReport
from spantrain.core.plan import Plan
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.errors import Interrupted
from spantrain.models.build import unit_names
from spantrain.models.tensor_parallel.division import take
from spantrain.outer.client.optimizer import OuterOptimizer
from spantrain.outer.client.parameters import spec_of
from spantrain.outer.local import LocalParameterServer
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.settings import OuterSettings
from spantrain.runtime.coordinator.meetings import StageMeetings, meeting_of
from spantrain.runtime.worker.outer_part import moves_layers, stage_layers
from testing.models.graphs import graph_of
from testing.outer.clients import EXACT
from testing.runtime.sessions import Ran, train_in_threads

HALVES = [Span(0, 3), Span(3, 6)]
JOB = TrainJob(steps=7, seed=5, learning_rate=0.01, warmup_steps=5, max_grad_norm=0.5, adapter="off")
CONFIG = MasterConfig(shards=("s0", "s1"), rule=EXACT, settings=OuterSettings(clip_norm=None, grace_s=0.0))


def cluster(server: LocalParameterServer, name: str = "a") -> OuterCluster:
    return OuterCluster(master=server.address, token=server.token, cluster=name, inner_steps=2)


def regrouped(plan: Plan, edges: list[int], groups: list[list[str]]) -> Plan:
    """The plan with other cuts, and replicas that are groups of its devices."""
    replica = plan.stages[0].replicas[0]
    stages = tuple(
        replace(
            plan.stages[0],
            first_unit=edges[index],
            end_unit=edges[index + 1],
            replicas=tuple(
                replace(replica, devices=tuple(names.split()), tp_shares=(1.0,) * len(names.split())) for names in row
            ),
        )
        for index, row in enumerate(groups)
    )
    return replace(plan, stages=stages)


def parts(ran: Ran, device: str) -> Mapping[str, TensorPart]:
    return ran.sessions[device]._part.holding.parts


def parameters(ran: Ran, device: str) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in ran.sessions[device]._part.holding.parameters.items()}


@pytest.fixture(scope="module")
def plan(make_plan, spec_of) -> Plan:
    """Two stages, the first of two replicas; the last holds a copy of the first's embedding."""
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[2, 1], [1]], [HALVES, HALVES], "1f1b")


@pytest.mark.timeout(300)
def test_alone_it_is_what_training_without_it_is(plan):
    with LocalParameterServer(CONFIG) as server:
        ran = train_in_threads(plan, JOB, outer=cluster(server))
        status = server.status()
        held = {name: parameters(ran, name) for name in plan.devices}
        whole = {**held["s1r0"], **held["s0r0"]}
        with OuterOptimizer(
            {name: torch.zeros_like(one) for name, one in whole.items()},
            master=server.address, token=server.token, cluster="late",
        ) as late:  # fmt: skip
            assert late.metrics.version == status.version
            shared = {name: one.clone() for name, one in late_parameters(late).items()}
    assert ran.losses == pytest.approx(train_in_threads(plan, JOB).losses, rel=1e-5)
    # Each token counts once, and all devices end with the shards' numbers, bit for bit.
    assert [one.tokens for one in status.clusters] == [7 * 6 * 8]
    for device in held.values():
        for name, one in device.items():
            assert torch.equal(one, shared[name]), name
    assert any(f"version {status.version}, " in text for text in ran.results["s0r0"].notices)


@pytest.mark.timeout(300)
def test_steps_that_overlap_take_versions_into_their_newest_weights(plan):
    job = replace(JOB, staleness=1)
    with LocalParameterServer(CONFIG) as server:
        ran = train_in_threads(plan, job, outer=cluster(server))
        status = server.status()
        whole = {**parameters(ran, "s1r0"), **parameters(ran, "s0r0")}
        with OuterOptimizer(
            {name: torch.zeros_like(one) for name, one in whole.items()},
            master=server.address, token=server.token, cluster="late",
        ) as late:  # fmt: skip
            shared = late_parameters(late)
            for device in plan.devices:
                for name, one in parameters(ran, device).items():
                    assert torch.equal(one, shared[name]), (device, name)
    assert status.version > 1
    assert [one.tokens for one in status.clusters] == [7 * 6 * 8]
    assert ran.losses == pytest.approx(train_in_threads(plan, job).losses, rel=1e-5)


def late_parameters(outer: OuterOptimizer) -> dict[str, torch.Tensor]:
    return outer._rounds._copy._live._live


@pytest.mark.timeout(300)
def test_units_that_move_while_it_trains_take_their_layers_along(plan, make_plan, spec_of):
    other = make_plan(spec_of("gpt2"), [0, 3, 5], [[2, 1], [1]], [HALVES, HALVES], "1f1b")
    with LocalParameterServer(CONFIG) as server:
        ran = train_in_threads(plan, JOB, {2: other}, outer=cluster(server))
        counted = server.status().clusters[0].tokens
    assert counted == 7 * 6 * 8
    assert ran.losses == pytest.approx(train_in_threads(plan, JOB, {2: other}).losses, rel=1e-5)


def test_a_stage_moves_what_it_holds_and_the_first_what_several_do(plan):
    graph = graph_of(plan.model)
    found = stage_layers(plan, graph)
    names = [name for stage in found.by_stage for name in found.names(stage)]
    assert len(names) == len(set(names))
    assert "transformer.wte.weight" in found.names(0)
    assert (found.leader, sorted(found.by_stage)) == (0, [0, 1])
    one_stage = replace(plan, stages=(replace(plan.stages[0], first_unit=0, end_unit=5),))
    assert stage_layers(one_stage, graph).layers == found.layers


def test_layers_are_those_of_the_plain_model(plan, reference):
    _, named = reference(plan.model, 0)
    named.pop("lm_head.weight", None)
    plain = group_layers(spec_of(name, one) for name, one in named.items())
    assert stage_layers(plan, graph_of(plan.model)).layers == plain


def test_plans_with_the_same_cuts_move_no_layers(plan):
    assert not moves_layers(plan, replace(plan, schedule="gpipe"))
    head, tail = plan.stages
    assert moves_layers(plan, replace(plan, stages=(replace(head, end_unit=3), replace(tail, first_unit=3))))


def test_a_meeting_is_the_same_for_all_and_for_who_asks_again():
    meetings = StageMeetings(frozenset({"d0"}))
    report = StageReport(order=StageOrder(push=1))
    first = meetings.meet("d0", 0, report)
    assert first.order.push == 1
    assert meetings.meet("d0", 0, StageReport(order=StageOrder(push=7))) is first


def test_a_run_that_is_aborted_lets_go_of_who_waits():
    meetings = StageMeetings(frozenset({"d0", "d1"}))
    meetings.abort("d1 was lost")
    with pytest.raises(Interrupted, match="d1 was lost"):
        meetings.meet("d0", 0, StageReport(order=StageOrder()))


def test_one_leads():
    assert meeting_of({"d0": None}) is None
    with pytest.raises(ValueError, match="one device leads the stages of a cluster, got none"):
        StageMeeting(reports={"d0": StageReport()})


def test_a_layer_that_a_cut_runs_through_is_moved_by_the_first_of_its_stages(make_plan, spec_of):
    spec = spec_of("resnet")
    names = unit_names(spec)
    cut = next(index for index, name in enumerate(names) if "stages.1.layers.1" in name)
    plan = make_plan(spec, [0, cut, len(names)], [[1], [1]], [HALVES, HALVES], "1f1b")
    found = stage_layers(plan, graph_of(spec))
    apart = [route for route in found.routes if route.holders != (route.mover,)]
    assert apart
    assert all("stages.1.layers.1" in route.spec.name for route in apart)
    assert {(route.mover, route.holders) for route in apart} == {(0, (1,))}
    moved = [name for stage in found.by_stage for name in found.names(stage)]
    assert sorted(moved) == sorted(one.name for layer in found.layers for one in layer.parameters)


@pytest.mark.timeout(300)
@pytest.mark.tensor_parallel
def test_groups_that_divide_tensors_take_versions_as_one(plan, make_plan, spec_of):
    """Behind the first step devices form groups, and behind the fourth others, with the layers moved elsewhere."""
    of_one = make_plan(spec_of("gpt2"), [0, 2, 5], [[2, 1, 1], [1, 1]], [HALVES, HALVES], "1f1b")
    grouped = regrouped(of_one, [0, 2, 5], [["s0r0 s1r1", "s0r2"], ["s1r0 s0r1"]])
    others = regrouped(of_one, [0, 3, 5], [["s1r0", "s0r1"], ["s1r1 s0r0 s0r2"]])
    with LocalParameterServer(CONFIG) as server:
        ran = train_in_threads(of_one, JOB, {0: grouped, 3: others}, outer=cluster(server))
        status = server.status()
        whole = {name: one.clone() for name, one in parameters(ran, "s1r0").items()}
        whole |= {name: torch.zeros(part.full_shape) for name, part in parts(ran, "s1r1").items() if name not in whole}
        with OuterOptimizer(whole, master=server.address, token=server.token, cluster="late") as late:
            shared = {name: one.clone() for name, one in late_parameters(late).items()}
    plain = train_in_threads(of_one, JOB, {0: grouped, 3: others})
    assert ran.losses == pytest.approx(plain.losses, rel=1e-5)
    assert [one.tokens for one in status.clusters] == [7 * 6 * 8]
    for device in of_one.devices:
        for name, part in parts(ran, device).items():
            assert torch.equal(parameters(ran, device)[name], take(shared[name], part)), (device, name)
