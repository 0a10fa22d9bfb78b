"""Devices go over to another plan between two steps: the losses are those of one process, whatever moves."""

from dataclasses import replace
from random import Random

import pytest

from spantrain.core.checkpoint import CheckpointContent
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.errors import Interrupted
from spantrain.runtime.checkpoint.tensor_file import step_folder
from spantrain.runtime.control.orders import KeptState
from spantrain.runtime.worker import trainer
from spantrain.runtime.worker.stale_session import session_of
from testing.runtime.places import BATCH, HALVES, UNEVEN, random_places
from testing.runtime.runs import OneProcess
from testing.runtime.sessions import Cast, Ran, train_in_threads

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=6, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5, evaluate_every=3)


def wanted(plan: Plan, steps: int = JOB.steps) -> list[float]:
    return OneProcess(plan.model, JOB, BATCH).train(0, steps)


def test_other_micro_batches_move_nothing(four):
    groups = [[["a"]], [["b"], ["c"]], [["d"]]]
    first = four([0, 2, 3, 5], groups)
    changes = {1: four([0, 2, 3, 5], groups, HALVES, "critical-path"), 3: four([0, 2, 3, 5], groups, UNEVEN, "zb-h1")}
    ran = train_in_threads(first, JOB, changes)
    assert ran.losses == pytest.approx(wanted(first), rel=1e-5)
    assert [outcome.step for outcome in ran.outcomes if outcome.switch] == [2, 4]
    assert [outcome.switch.received_bytes for outcome in ran.outcomes if outcome.switch] == [0, 0]
    print([outcome.switch for outcome in ran.outcomes if outcome.switch])
    assert ran.held_out == pytest.approx(train_in_threads(first, JOB).held_out, rel=1e-5)
    assert_clean(ran)


CHANGES = {
    "a unit to the neighbour": ([0, 1, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]]),
    "two tied units on one device": ([0, 5], [[["a"], ["b"], ["c"], ["d"]]]),
    "a longer pipeline": ([0, 1, 2, 3, 5], [[["d"]], [["c"]], [["b"]], [["a"]]]),
    "replicas that divide tensors": ([0, 2, 5], [[["a", "c"]], [["d", "b"]]]),
    "unlike replicas": ([0, 3, 5], [[["c"], ["a", "d"]], [["b"]]]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_units_move_and_come_back(name, four):
    first = four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]])
    ran = train_in_threads(first, JOB, {1: four(*CHANGES[name]), 3: replace(first, schedule="critical-path")})
    assert ran.losses == pytest.approx(wanted(first), rel=1e-5)
    switches = [outcome.switch for outcome in ran.outcomes if outcome.switch]
    print(name, switches)
    assert switches[0].received_bytes > 0
    assert (switches[1].received_bytes == 0) == (
        name == "two tied units on one device"
    )  # each has kept all that it needs
    assert_clean(ran)


@pytest.mark.parametrize("seed", range(4))
def test_any_plan_after_any_other(seed, four):
    random = Random(seed)
    family = random.choice(["gpt2", "resnet"])
    first = four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]], family=family)
    plans = [four(*random_places(random), family=family) for _ in range(4)]
    ran = train_in_threads(first, JOB, dict(enumerate(plans, start=1)))
    assert ran.losses == pytest.approx(wanted(first), rel=1e-4)
    assert_clean(ran)


def test_as_a_run_that_began_with_the_plan_at_that_checkpoint(four, tmp_path):
    first = four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]])
    second = four([0, 1, 3, 5], [[["b"]], [["a"], ["d"]], [["c"]]], HALVES, "critical-path")
    job = replace(JOB, checkpoint_every=2)
    ran = train_in_threads(first, job, {1: second}, out=tmp_path)
    (manifest,) = (manifest for manifest in ran.manifests if manifest.step == 2)
    folder = step_folder(tmp_path / "checkpoint", 2)
    again = train_in_threads(replace(second, generation=9), JOB, content=manifest.content, folder=folder)
    assert again.losses == pytest.approx(ran.losses[2:], rel=1e-6)
    # And what it saves under the second plan is whole.
    (manifest,) = (manifest for manifest in ran.manifests if manifest.step == 4)
    folder = step_folder(tmp_path / "checkpoint", 4)
    again = train_in_threads(replace(first, generation=9), JOB, content=manifest.content, folder=folder)
    assert again.losses == pytest.approx(ran.losses[4:], rel=1e-5)


def assert_clean(ran: Ran) -> None:
    """Nothing was lost on the way, and the decisions left are of the last plan."""
    assert all(result.refused == {} for result in ran.results.values())
    last = max((outcome.step for outcome in ran.outcomes if outcome.advice), default=-1)
    for result in ran.results.values():
        assert all(decision.step > last for decision in result.decisions.decisions)


@pytest.mark.parametrize("begun", [KeptState(verdict=None), None], ids=["what others hold", "a checkpoint"])
def test_who_was_given_nothing_yet_holds_nothing(begun, four, monkeypatch, tmp_path):
    """Interrupted before anything came, by another's loss: its parameters are as memory had them."""
    cast = Cast(four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]]), JOB, {}, tmp_path, 2)
    content = CheckpointContent(step=2)
    order = replace(cast.order(None, None), first_step=2, kept=begun, checkpoint=None if begun else content)
    cast.serve(order)
    session = session_of(order, cast.links("a"))
    for lost in ("carry_on", "restore"):
        monkeypatch.setattr(trainer, lost, _interrupted)
    with pytest.raises(Interrupted):
        session.run()
    assert session.leave(KeptState(verdict=None), 2) is None


def _interrupted(*_: object) -> None:
    raise Interrupted("another device was lost")
