"""Units against the unsplit transformers models; weights that do not depend on what is built with them."""

import pytest
import torch

from spantrain.models.build import build_units, unit_count, whole_model
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import parameter_names, sample_losses, shared_parameters


def unsplit_model(spec):
    return whole_model(spec, seed=0).module


def full_parameters(units):
    return {full: unit.get_parameter(local) for unit in units for local, full in parameter_names(unit).items()}


def copy_weights(units, unsplit):
    missing, unexpected = unsplit.load_state_dict(full_parameters(units), strict=False)
    assert not unexpected
    buffers = {name for name, _ in unsplit.named_buffers()}
    tied = {"cls.predictions.decoder.bias"}
    assert set(missing) <= buffers | tied


def test_units_names_are_those_of_the_unsplit_model(spec):
    state = unsplit_model(spec).state_dict()
    found = full_parameters(build_units(spec, seed=0))
    assert {name: state[name].shape for name in found} == {name: value.shape for name, value in found.items()}
    trainable = {name for name, _ in unsplit_model(spec).named_parameters()}
    assert trainable <= set(found)


def test_units_in_a_chain_give_the_unsplit_models_logits_and_loss(spec):
    units = build_units(spec, seed=3)
    unsplit = unsplit_model(spec)
    copy_weights(units, unsplit)
    data = open_dataset(spec)
    inputs, labels = data.inputs(range(4)), data.labels(range(4))
    with torch.no_grad():
        hidden = inputs
        for unit in units[:-1]:
            hidden = unit(*hidden)
        theirs = unsplit(*inputs).logits
        torch.testing.assert_close(units[-1].logits(*hidden), theirs, rtol=1e-5, atol=1e-5)
        # The library's loss for GPT-2 shifts labels by itself; every sample counts as many labels, so means agree.
        given = torch.cat([torch.full((4, 1), -100), labels[:, :-1]], dim=1) if spec.family == "gpt2" else labels
        kept = torch.cat([labels[:, :-1], torch.full((4, 1), -100)], dim=1) if spec.family == "gpt2" else labels
        expected = unsplit(*inputs, labels=given).loss
        torch.testing.assert_close(units[-1](*hidden, kept) / 4, expected, rtol=1e-5, atol=1e-5)


def test_units_weights_do_not_depend_on_which_units_are_built(spec):
    everything = build_units(spec, seed=7)
    last = unit_count(spec) - 1
    for wanted in ([last], [2, 1], [0]):
        for index, unit in zip(wanted, build_units(spec, wanted, seed=7), strict=True):
            assert unit.name == everything[index].name
            for name, value in unit.state_dict().items():
                assert torch.equal(value, everything[index].state_dict()[name]), name


def test_units_differ_by_seed_and_leave_the_global_random_state(spec):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_units(spec, [1], seed=0)[0]
    second = build_units(spec, [1], seed=1)[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(("family", "group"), [("gpt2", "wte"), ("bert", "word_embeddings")])
def test_units_tied_parameters_are_one_object_together_and_equal_copies_apart(family, group, small_spec):
    spec = small_spec(family)
    last = unit_count(spec) - 1
    together = build_units(spec, [0, last], seed=0)
    members = shared_parameters(together)[group]
    first, second = (together[position].get_parameter(local) for position, local in members)
    assert first is second
    apart = [build_units(spec, [index], seed=0)[0] for index in (0, last)]
    copies = [unit.get_parameter(local) for unit, (_, local) in zip(apart, members, strict=True)]
    assert copies[0] is not copies[1]
    assert torch.equal(copies[0], copies[1])
    assert torch.equal(copies[0], first)


def test_units_gradients_do_not_depend_on_how_the_batch_is_cut(spec, chain_loss):
    units = build_units(spec, seed=0)
    for unit in units:
        unit.train()  # has no effect: batch statistics stay frozen
    data = open_dataset(spec)
    gradients = []
    for pieces in ([range(6)], [range(1), range(1, 6)]):
        for unit in units:
            unit.zero_grad()
        for piece in pieces:
            chain_loss(units, data.inputs(piece), data.labels(piece)).backward()
        gradients.append([p.grad.clone() for unit in units for p in unit.parameters()])
    for whole, cut in zip(*gradients, strict=True):
        assert whole.norm() > 0
        assert (whole - cut).norm() <= 1e-5 * whole.norm()


def test_units_learn(spec, chain_loss):
    units = build_units(spec, seed=0)
    data = open_dataset(spec)
    parameters = list(dict.fromkeys(p for unit in units for p in unit.parameters()))
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = chain_loss(units, data.inputs(range(32)), data.labels(range(32))) / 32
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_units_index_out_of_range_is_refused(spec):
    with pytest.raises(ValueError, match="units 0 to"):
        build_units(spec, [unit_count(spec)], seed=0)


def test_units_loss_of_a_sample_is_the_mean_over_its_counted_labels():
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[1, -100, 2], [3, -100, -100]])
    expected = [
        torch.nn.functional.cross_entropy(logits[0, [0, 2]], labels[0, [0, 2]]),
        torch.nn.functional.cross_entropy(logits[1, :1], labels[1, :1]),
    ]
    torch.testing.assert_close(sample_losses(logits, labels), torch.stack(expected))


def test_units_sample_without_counted_labels_has_no_loss():
    assert sample_losses(torch.randn(1, 2, 5), torch.full((1, 2), -100)).tolist() == [0.0]
