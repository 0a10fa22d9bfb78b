"""A cluster that trains on during its exchanges loses nothing and counts nothing twice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.errors import ProtocolError
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.rules.nesterov import Nesterov
from spantrain_studies.outer.plain import pseudo_gradient
from testing.outer.rounds import MadeUpRounds, random_tensors, without_clip


def moved(copy: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A step of training: whole numbers, so that sums are exact."""
    step = {name: (4 * one).round() for name, one in random_tensors(seed).items()}
    for name, one in copy.items():
        one.sub_(step[name])
    return step


def pushed_of(copy: ClusterCopy) -> dict[str, torch.Tensor]:
    taken = copy.take()
    return pseudo_gradient(taken.start, taken.now)


def whole(seed: int) -> dict[str, torch.Tensor]:
    return {name: (8 * one).round() for name, one in random_tensors(seed).items()}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["train", "push", "count", "skip", "pull", "others"]), max_size=25))
def test_the_server_and_the_cluster_together_hold_every_step_once(happenings):
    """A server that adds what it is told is counted; others change it, too. All numbers are whole: no rounding."""
    live, server = whole(0), whole(0)
    copy, pushed, all_steps = ClusterCopy(live), None, {name: torch.zeros_like(one) for name, one in live.items()}
    for k, happens in enumerate([*happenings, "skip", "push", "count"]):
        if happens == "train":
            for name, one in moved(live, k).items():
                all_steps[name] += one
        elif happens == "push" and pushed is None:
            pushed = pushed_of(copy)
        elif happens == "skip" and pushed is not None:
            pushed = None
            copy.skipped()
        elif happens == "count" and pushed is not None:
            server = {name: one - pushed[name] for name, one in server.items()}
            copy.pulled({name: one.clone() for name, one in server.items()}, counted=True)
            pushed = None
        elif happens == "others":
            for name, one in moved(server, k).items():
                all_steps[name] += one
        elif happens == "pull":
            copy.pulled({name: one.clone() for name, one in server.items()}, counted=False)
    for name, one in live.items():
        assert torch.equal(server[name], whole(0)[name] - all_steps[name])
        assert torch.equal(one, server[name])


@pytest.mark.parametrize("meanwhile", [0, 3])
def test_one_cluster_with_rate_1_and_no_momentum_is_local_training_also_while_it_exchanges(meanwhile):
    live, alone = whole(0), whole(0)
    rule = Nesterov(learning_rate=1.0, momentum=0.0)
    made = MadeUpRounds(whole(0), "a", shards=2, rule=rule, settings=without_clip())
    copy = ClusterCopy(live)
    for k in range(4):
        for j in range(2):
            moved(live, 10 * k + j), moved(alone, 10 * k + j)
        pushed = pushed_of(copy)
        for j in range(meanwhile):
            moved(live, 10 * k + 5 + j), moved(alone, 10 * k + 5 + j)
        made.push("a", pushed, tokens=2)
        copy.pulled(made.start["a"], counted=True)
        for name, one in live.items():
            assert torch.equal(one, alone[name])


def test_a_cluster_that_did_nothing_meanwhile_holds_the_version_bit_for_bit():
    live = random_tensors(0)
    copy = ClusterCopy(live)
    copy.take()
    copy.pulled(random_tensors(1), counted=True)
    for name, one in random_tensors(1).items():
        assert torch.equal(live[name], one)


def test_what_is_not_finite_in_a_cluster_ends_with_the_next_version():
    live = random_tensors(0)
    copy = ClusterCopy(live)
    spoiled, whole_one = list(live)[:2]
    live[spoiled].view(-1)[0], live[spoiled].view(-1)[1] = torch.nan, torch.inf
    copy.take()
    live[whole_one].add_(1.0)
    copy.pulled(random_tensors(1), counted=True, left_out=True)
    assert torch.equal(live[spoiled], random_tensors(1)[spoiled])
    assert torch.allclose(live[whole_one], random_tensors(1)[whole_one] + 1.0)


def test_parameters_that_are_trained_are_changed_in_place():
    model = torch.nn.Linear(2, 2)
    before = model.weight
    copy = ClusterCopy(dict(model.named_parameters()))
    copy.pulled({name: torch.ones_like(one) for name, one in model.named_parameters()}, counted=False)
    assert model.weight is before
    assert before.requires_grad
    assert torch.equal(before, torch.ones(2, 2))


def test_what_is_taken_is_a_copy():
    live = random_tensors(0)
    taken = ClusterCopy(live).take()
    moved(live, 1)
    assert torch.equal(taken.now["0.bias"], random_tensors(0)["0.bias"])


def test_a_version_of_another_model_changes_nothing():
    live = random_tensors(0)
    with pytest.raises(ProtocolError, match=r"differs from the model in 0\.bias, x"):
        ClusterCopy(live).pulled({**random_tensors(1), "0.bias": torch.zeros(5), "x": torch.zeros(1)}, counted=False)
    assert torch.equal(live["0.weight"], random_tensors(0)["0.weight"])
