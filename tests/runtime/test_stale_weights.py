"""Two sets of weights and one optimizer that works on both in turn."""

import torch
from torch import nn

from spantrain.runtime.worker.stale_session import TwoSets


def sets_of(value: float) -> tuple[TwoSets, dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    even, odd = ({"w": nn.Parameter(torch.full((2,), value))} for _ in range(2))
    return TwoSets(even, odd), even, odd


def test_an_update_begins_at_the_weights_behind_and_lies_in_the_steps_own_memory():
    sets, even, odd = sets_of(1.0)
    optimizer = torch.optim.SGD(sets.newest.values(), lr=1.0, momentum=0.5)
    values = []
    for step in range(4):
        own = sets.of(step)["w"]
        values.append(float(own.detach()[0]))
        own.grad = torch.full((2,), 0.1)
        sets.prepare_update(step)
        assert own.grad is None
        optimizer.step()
        assert sets.newest["w"].data_ptr() == own.data_ptr()
    # V0 = V1 = 1; then each update is of the one before, with one momentum: 0.1, 0.15, 0.175, ...
    assert torch.allclose(torch.tensor(values), torch.tensor([1.0, 1.0, 0.9, 0.75]))
    assert len(optimizer.state) == 1
    sets.synchronize()
    assert torch.equal(even["w"], odd["w"])
    assert torch.equal(odd["w"], sets.newest["w"])


def test_an_update_of_one_set_is_no_change_of_the_other():
    """A graph of the next step stays good while this step's weights are updated."""
    sets, even, odd = sets_of(2.0)
    optimizer = torch.optim.SGD(sets.newest.values(), lr=1.0)
    loss = (odd["w"] ** 2).sum()
    even["w"].grad = torch.ones(2)
    sets.prepare_update(0)
    optimizer.step()
    loss.backward()
    assert torch.equal(odd["w"].grad, torch.full((2,), 4.0))
    assert torch.equal(even["w"].detach(), torch.ones(2))
