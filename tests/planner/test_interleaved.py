"""Pipelines dealt out in several rounds: what is proposed, when the default takes it, and what it holds."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from spantrain.app.planning.explain import explain_plan
from spantrain.app.planning.plan_files import check_staleness
from spantrain.app.planning.protection import about_keepers
from spantrain.app.profiling.describe import described_profile
from spantrain.app.training.requests import TrainRequest
from spantrain.config.artefacts import read_plan, write_plan
from spantrain.config.cluster_file import load_cluster, load_preset
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.cost.memory import MemoryCost, most_held_bytes
from spantrain.devices.registry import BACKENDS
from spantrain.errors import ConfigError, InfeasiblePlanError, PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import predict
from spantrain.planner.present import full_plan, light_plan
from spantrain.planner.request import Constraints, JobSpec, PlanRequest
from spantrain.planner.strategies.baselines import equal_layers
from spantrain.planner.strategies.dealing import dealings
from spantrain.planner.strategies.interleaved import interleaved, interleavings, may_interleave
from spantrain.recovery.protection import protected
from spantrain.schedule.dispatch.policies import known_order
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import check_orders
from spantrain.schedule.registry import replica_tasks

JOB = JobSpec(global_batch=8)


@pytest.fixture
def profile(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Callable[..., Profile]:
    """Some devices of unlike speed, each in a site of its own, and a model with tied embeddings."""

    def build(*speeds: float, memory_bytes: int = 2**40, vocabulary: int = 256, blocks: int = 12) -> Profile:
        cluster = make_cluster({f"s{n}": {f"d{n}": speed} for n, speed in enumerate(speeds)}, memory_bytes=memory_bytes)
        return make_profile(cluster, make_graph(blocks=blocks, vocabulary=vocabulary))

    return build


def request_of(profile: Profile, **fields: object) -> PlanRequest:
    return PlanRequest(profile=profile, job=JOB, evaluate=Evaluator(profile, JOB), **fields)  # type: ignore[arg-type]


def test_layers_are_dealt_out_in_rounds_and_the_order_fits(profile):
    known = profile(1.0, 2.0, 1.0)
    request = request_of(known)
    found = interleaved(request)
    assert found
    for proposal in found:
        plan = proposal.plan
        evaluation = request.evaluate(plan)
        assert plan.interleaved
        assert evaluation.fits
        assert plan.hints is not None
        check_orders([[known_order(task) for task in row] for row in replica_tasks(plan)], CutLayout.of(plan))
        assert evaluation.step_s == pytest.approx(plan.hints.predicted_s, rel=0.02)
        busy = {crew.devices[0]: len(crew.units) for crew in plan.crews}
        assert busy["d1"] >= max(busy["d0"], busy["d2"]) - 1, "the fast device has no fewer units"
    bases = [one.plan for one in found]
    assert not any(map(may_interleave, bases)), "not once more"


@pytest.mark.parametrize(
    ("speeds", "blocks", "global_batch", "hidden"),
    [
        ((0.7, 0.9), 4, 12, 512),
        ((0.6, 0.6), 5, 16, 512),
        ((0.8, 0.9, 1.0), 9, 16, 512),
        ((0.6, 0.9, 1.1), 10, 12, 1024),
    ],
)
def test_the_default_is_no_worse_whatever_its_own_pipelines_are(
    make_cluster, make_graph, make_profile, speeds, blocks, global_batch, hidden
):
    """Its best plans are pipelines with other micro-batches, or none."""
    cluster = make_cluster({"a": {f"d{n}": speed for n, speed in enumerate(speeds)}})
    known, job = make_profile(cluster, make_graph(blocks=blocks, hidden=hidden)), JobSpec(global_batch=global_batch)
    names = ("auto", "interleaved")
    plans = (make_plan(known, job, PlanOptions(strategies=(name,))).plan for name in names)
    ours_s, theirs_s = (Evaluator(known, job)(plan).step_s for plan in plans)
    assert ours_s <= 1.005 * theirs_s


def test_devices_of_a_kind_are_a_pipeline_whatever_else_there_is(tmp_path):
    """Two fast cards on a slow network are best alone, dealt out; a plain pipeline of all is no start for that."""
    fast = (
        "  - {name: home, network: {bandwidth: 1 Gbit/s, latency: 0.5 ms}, hosts: [{name: h, devices: {rtx-4090: 2}, "
        "inside: none}]}"
    )
    slow = (
        "  - {name: lab, network: {bandwidth: 10 Gbit/s, latency: 0.1 ms}, hosts: [{name: a, devices: "
        "{rtx-2080-ti: 4}, inside: pcie}, {name: b, devices: {v100: 2}, inside: nvlink}]}"
    )
    links = "links: [{between: [home, lab], bandwidth: 20 Mbit/s, latency: 20 ms}]"
    path, found_s = tmp_path / "cluster.yaml", []
    for lines in ((fast,), (fast, slow, links)):
        path.write_text("\n".join(("name: two", "sites:", *lines)))
        known = described_profile(load_cluster(path), resolve_model("gpt2-large"))
        found_s.append(make_plan(known, JobSpec(global_batch=16), PlanOptions()).step_s_predicted)
    assert found_s[1] <= 1.005 * found_s[0]


def test_what_beginning_and_end_share_is_summed_nowhere(profile):
    """A large vocabulary over links between sites: the default has the end of the model on the first device, too."""
    known = profile(1.0, 1.0, vocabulary=40_000)
    without = make_plan(known, JOB, PlanOptions(constraints=Constraints(interleaving=False, keep=("d0", "d1"))))
    best = make_plan(known, JOB, PlanOptions(constraints=Constraints(keep=("d0", "d1"))))
    assert not without.plan.interleaved
    assert best.plan.interleaved
    assert best.step_s_predicted < 0.9 * without.step_s_predicted
    assert {0, len(best.plan.stages) - 1} <= set(best.plan.crews[0].numbers)
    assert any("what both ends share is in one place" in reason for reason in best.report.reasons)
    # Plans for what is left of a plain plan's devices are plain, too.
    assert not full_plan(without.plan, known, ("d0", "d1"), optimizer="adamw").plan.interleaved
    again = light_plan(best.plan, known, ("d1",), optimizer="adamw")
    assert again.plan.devices == ("d1",)
    assert again.how == "stages cut anew on 1 device"


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"recompute_all": True}])
def test_the_default_keeps_to_what_was_asked_for(profile, options):
    job = replace(JOB, schedule=options.get("schedule", JOB.schedule))
    limits = Constraints(keep=("d0", "d1"), recompute_all=options.get("recompute_all", False))
    found = make_plan(profile(1.0, 1.0, vocabulary=40_000), job, PlanOptions(constraints=limits))
    assert not found.plan.interleaved


def test_another_order_of_work_is_refused(profile):
    request = replace(request_of(profile(1.0, 2.0)), job=replace(JOB, schedule="gpipe"))
    with pytest.raises(InfeasiblePlanError, match="an order of their own, not gpipe; leave out --schedule"):
        interleaved(request)


def test_steps_of_such_a_plan_do_not_overlap(profile):
    known = profile(1.0, 2.0, 1.0)
    plan = interleaved(request_of(known))[0].plan
    with pytest.raises(PlanError, match=r"--staleness 1: devices have several stages each.*--no-interleaving"):
        check_staleness(plan, known, TrainJob(steps=1, staleness=1, adapter="off"))


def test_the_papers_adapter_is_refused_where_it_could_change_nothing(profile, tmp_path):
    known = profile(1.0, 1.0)
    several, plain = interleaved(request_of(known))[0].plan, equal_layers("1f1b", request_of(known))[0].plan

    def asked(plan: Plan) -> TrainRequest:
        job = TrainJob(steps=1, adapter="paper")
        return TrainRequest(plan=plan, profile=known, profile_path="profile.json", job=job, out=tmp_path)

    assert asked(plain).plan == plain
    with pytest.raises(ConfigError, match=r"--adapter paper changes micro-batches.*train with --adapter auto"):
        asked(several)


def test_memory_is_that_of_the_order(profile):
    known = profile(1.0, 1.0)
    plan = interleaved(request_of(known))[0].plan
    memory = MemoryCost(known)
    peaks, besides = memory.plan_peak_bytes(plan), memory.crew_sizes(plan)
    for crew, row in zip(plan.crews, replica_tasks(plan), strict=True):
        device, order = crew.devices[0], known_order(row[0])
        size, per_sample = besides[device]
        assert peaks[device] == size + most_held_bytes(order, per_sample)
        limits = sum(
            stage.replicas[0].in_flight_limit * per_sample[number]
            for number, stage in zip(crew.numbers, crew.stages, strict=True)
        )
        assert most_held_bytes(order, per_sample) <= limits
    run = predict(plan, known, optimizer="adamw")
    state = memory.plan_held_sizes(plan)
    for device, held in run.memory.items():
        assert state[device].always.total_bytes < held.peak_bytes <= peaks[device]


def test_little_room_gives_other_orders_and_not_too_much(profile):
    plenty = request_of(profile(1.0, 2.0, 1.0))
    most = max(max(plenty.evaluate(one.plan).peak_bytes.values()) for one in interleaved(plenty))
    steps = [min(plenty.evaluate(one.plan).step_s for one in interleaved(plenty))]
    framework = BACKENDS["emulated"].framework_bytes
    for part in (0.95, 0.9, 0.85):
        request = request_of(profile(1.0, 2.0, 1.0, memory_bytes=framework + int(part * (most - framework))))
        found = interleaved(request)
        assert all(request.evaluate(one.plan).fits for one in found)
        steps.append(min(request.evaluate(one.plan).step_s for one in found))
    assert steps[-1] >= steps[0]


def test_without_room_for_state_there_is_none(profile):
    with pytest.raises(InfeasiblePlanError):
        interleaved(request_of(profile(1.0, 1.0, memory_bytes=2**20)))
    alone = request_of(profile(1.0))
    with pytest.raises(InfeasiblePlanError, match="it takes two devices or more"):
        interleaved(alone)
    assert list(interleavings([], alone)) == []
    assert {places[-1] for places in dealings(2)} == {0, 1}


def test_plan_files_say_which_stage_each_action_is_of(profile, tmp_path):
    plan = interleaved(request_of(profile(1.0, 2.0)))[0].plan
    assert plan.hints is not None
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_explained_and_kept_by_others():
    known = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    plan = interleaved(request_of(known))[0].plan
    told = explain_plan(plan, known)
    assert told.limited_by.startswith("the work of ")
    assert {entry.kind for entry in told.helps} <= {"link", "latency", "faster devices"}
    room = dict.fromkeys(plan.devices, 2**40)
    kept = protected(plan, 1, kept_bytes=[1] * len(plan.crews), room=room)
    assert all(crew.first.keepers and crew.first.keepers == crew.stages[-1].keepers for crew in kept.crews)
    assert any(line.startswith("Kept twice: stages 0 and") for line in about_keepers(kept, known, "adamw", 1))
    with pytest.raises(PlanError, match="do not overlap where stages share devices"):
        predict(plan, known, staleness=1)
