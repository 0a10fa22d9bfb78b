"""What is drawn: rates, independence, and the same numbers however samples are cut."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from spantrain.errors import ConfigError
from spantrain.models.randomness.counter import at_least, fractions, normals, random_bits, row_words
from spantrain.models.randomness.draws import seeded
from spantrain.models.randomness.places import DrawnShape, seen_shape, seen_shapes

CPU = torch.device("cpu")
NUMBERS = 1 << 16


def kept(
    chance: float, *, seed: int = 0, step: int = 0, place: str = "here", first: int = 0, samples: int = 8
) -> Tensor:
    bits = random_bits(row_words(seed, step, first, samples, CPU), place, torch.arange(NUMBERS, dtype=torch.int32))
    return at_least(bits, chance)


@pytest.mark.parametrize("chance", [0.01, 0.1, 0.5, 0.9])
def test_rate_of_dropping_is_the_probability(chance: float) -> None:
    deviation = math.sqrt(chance * (1 - chance) / NUMBERS)
    for row in kept(chance):
        assert abs(1 - row.float().mean() - chance) < 5 * deviation


def test_nothing_and_all_can_be_dropped() -> None:
    assert kept(0.0).all()
    assert not kept(1.0).any()


def test_samples_steps_seeds_and_places_are_independent() -> None:
    drawn = [*kept(0.5), *kept(0.5, step=1), *kept(0.5, seed=1), *kept(0.5, place="there"), *kept(0.5, place="here:1")]
    signs = torch.stack(drawn).float() * 2 - 1
    for one, other in combinations(range(len(drawn)), 2):
        correlation = float((signs[one] * signs[other]).mean())
        assert abs(correlation) < 5.5 / math.sqrt(NUMBERS), (one, other)


def test_neighbours_in_a_row_and_over_rows_are_independent() -> None:
    signs = kept(0.5, samples=512)[:, :2048].float() * 2 - 1
    for shift in (1, 2, 3, 7, 64, 1024):
        assert abs(float((signs * signs.roll(shift, 1)).mean())) < 5 / math.sqrt(signs.numel())
        assert abs(float((signs * signs.roll(shift % 511, 0)).mean())) < 5 / math.sqrt(signs.numel())
    # Counts of rows and of columns spread as independent draws do.
    for counts, of in ((signs.sum(1), 2048), (signs.sum(0), 512)):
        assert float(counts.var()) == pytest.approx(of, rel=0.25)


def test_fractions_and_normals_have_their_distributions() -> None:
    words, index = row_words(3, 5, 0, 4, CPU), torch.arange(NUMBERS, dtype=torch.int32)
    even = fractions(random_bits(words, "even", index), torch.float32)
    assert 0 <= float(even.min()) <= float(even.max()) < 1
    assert torch.histc(even, 16, 0, 1).sub(even.numel() / 16).abs().max() < 6 * math.sqrt(even.numel() / 16)
    coarse = fractions(random_bits(words, "even", index), torch.bfloat16)
    assert coarse.dtype == torch.bfloat16
    assert float(coarse.max()) < 1
    bell = normals(words, "bell", index)
    assert float(bell.mean()) == pytest.approx(0, abs=0.01)
    assert float(bell.std()) == pytest.approx(1, abs=0.01)
    assert float((bell.abs() > 1.96).float().mean()) == pytest.approx(0.05, abs=0.002)


def test_the_first_numbers_stay_what_they_are() -> None:
    """A checkpoint of an older version goes on with the same masks."""
    bits = random_bits(row_words(1, 2, 3, 1, CPU), ">>h.0:0", torch.arange(4, dtype=torch.int32))
    assert bits.tolist() == [[-1164773518, 268906233, 187847513, 1456280432]]


class AllDraws(nn.Module):
    """Draws in most ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.loop = nn.LSTM(16, 16, num_layers=3, dropout=0.5, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, given: Tensor) -> Tensor:
        rows, head = given.shape[0], given[:, None]
        hidden = functional.scaled_dot_product_attention(head, head, head, dropout_p=0.5, is_causal=True)[:, 0]
        hidden = functional.dropout1d(functional.alpha_dropout(hidden, 0.2, training=True), 0.2)
        hidden = hidden * torch.bernoulli(torch.full((rows, 1, 1), 0.5)) + torch.randn_like(hidden)
        hidden = hidden * torch.rand([]) + hidden.new_empty((rows, 1, 1)).bernoulli_(0.5) + torch.rand(rows, 1, 1)
        hidden = hidden + functional.gumbel_softmax(hidden) + torch.randint(0, 5, (rows, 1, 1))
        hidden = hidden[:, torch.randperm(5)] + torch.multinomial(hidden.abs().flatten(1), 2).sum(1)[:, None, None] / 80
        hidden = hidden + hidden.abs().flatten(0, 1).multinomial(3, replacement=True).view(rows, 5, 3)[..., :1] / 16
        hidden = self.drop(self.drop(hidden)).flatten(0, 1)
        hidden = self.drop(hidden).view_as(given)
        hidden = self.encoder(self.attention(hidden, hidden, hidden)[0])
        return self.loop(hidden)[0].sum(dim=(1, 2))


def drawn_twice(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return a model's results for a whole step, and piece by piece."""
    with seeded(model, seed=1, step=2):
        whole = model(batch)
    pieces = []
    for lo, hi in ((0, 1), (1, 4), (4, 6)):
        with seeded(model, seed=1, step=2, first_sample=lo):
            pieces.append(model(batch[lo:hi]))
    return whole, torch.cat(pieces)


def test_samples_are_drawn_for_alike_in_any_pieces() -> None:
    torch.manual_seed(0)
    model, batch = AllDraws(), torch.randn(6, 5, 16)
    whole, pieces = drawn_twice(model, batch)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)
    with seeded(model, seed=1, step=3):
        assert not torch.allclose(model(batch), whole)
    assert len(set(whole.tolist())) == 6


def test_torchs_own_generator_is_left_alone() -> None:
    model, batch = AllDraws(), torch.randn(6, 5, 16)
    before = torch.get_rng_state()
    drawn_twice(model, batch)
    assert torch.equal(before, torch.get_rng_state())


def test_gradients_go_where_numbers_were_kept() -> None:
    layer, given = nn.Dropout(0.25), torch.ones(4, 1000, requires_grad=True)
    with seeded(layer, seed=0, step=0):
        result = layer(given)
    result.sum().backward()
    torch.testing.assert_close(given.grad, result.detach())
    assert result.unique().tolist() == pytest.approx([0, 4 / 3])


def test_shared_dropout_draws_anew_at_each_place() -> None:
    drop = nn.Dropout(0.5)
    model = nn.Sequential(nn.Sequential(nn.Identity(), drop), nn.Sequential(nn.Identity(), drop), drop)
    with seeded(model, seed=0, step=0) as draws:
        model(torch.ones(2, 64))
    assert len(draws.noted) == 3


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_shorter_types(kind: str) -> None:
    model, batch = (
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.TransformerEncoderLayer(16, 2, 8)),
        torch.randn(6, 5, 16),
    )
    model[2].self_attn.batch_first = True
    if kind == "bfloat16":
        whole, pieces = drawn_twice(model.bfloat16(), batch.bfloat16())
        assert whole.dtype == torch.bfloat16
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole, pieces = drawn_twice(model, batch)
    torch.testing.assert_close(pieces, whole, rtol=0.05, atol=0.05)
    assert bool((whole != 0).any())


def test_what_no_sample_is_known_of_is_noted() -> None:
    class Counts(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            return torch.poisson(given)

    model = nn.Sequential(Counts())
    with seeded(model, seed=0, step=0) as draws:
        model(torch.ones(4, 2))
    assert draws.unlike == ["0: `poisson` draws by aten.poisson.default"]


@pytest.mark.parametrize("replacement", [False, True])
def test_categories_are_chosen_by_their_weights(replacement: bool) -> None:
    class Chooses(nn.Module):
        def forward(self, weights: Tensor) -> Tensor:
            return torch.multinomial(weights, 2, replacement=replacement)

    weights = torch.tensor([1.0, 0.0, 5.0, 2.0])
    with seeded(Chooses(), seed=4, step=1) as draws:
        model = Chooses()
        draws.resize(NUMBERS)
        chosen = model(weights.expand(NUMBERS, 4))
    first = torch.bincount(chosen[:, 0], minlength=4) / NUMBERS
    torch.testing.assert_close(first, weights / 8, atol=0.01, rtol=0)
    assert first[1] == 0
    assert bool((chosen[:, 0] == chosen[:, 1]).any()) is replacement


def test_an_order_is_drawn_once_for_all_samples_and_never_of_them() -> None:
    with seeded(nn.Identity(), seed=0, step=0) as draws:
        draws.resize(8)
        orders = [torch.randperm(8), torch.randperm(8)]
    assert all(sorted(order.tolist()) == list(range(8)) for order in orders)
    assert orders[0].tolist() != orders[1].tolist()
    small, large = ({":0": ("randperm", (size,))} for size in (2, 3))
    assert seen_shapes(small, large, (2, 3)) == (
        {},
        ("`randperm` in the model draws (2,) and (3,) for 2 and 3 samples",),
    )
    assert seen_shapes(small, small, (2, 3))[0] == {":0": DrawnShape(dim=None, sizes=(2,))}


def test_choices_of_one_sample_after_another_are_allowed_where_they_are_checked() -> None:
    small, large = ({f":{row}": ("multinomial", (7,)) for row in range(samples)} for samples in (2, 3))
    assert seen_shapes(small, large, (2, 3), in_loops=True)[1] == ()
    assert "draws nothing and (7,)" in seen_shapes(small, large, (2, 3))[1][0]


def test_dropout_of_packed_sequences_is_refused_with_a_remedy() -> None:
    class Packed(nn.LSTM):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(nn.utils.rnn.pack_padded_sequence(given, torch.tensor([4, 2])))

    model = Packed(3, 3, num_layers=2, dropout=0.5)
    with seeded(model, seed=0, step=0), pytest.raises(ConfigError, match=r"packed sequences.*--dropout off"):
        model(torch.ones(4, 2, 3))


def test_samples_are_found_by_two_sizes() -> None:
    assert seen_shape((2, 5), (3, 5), (2, 3)) == DrawnShape(dim=0, sizes=(5,))
    assert seen_shape((8, 5), (12, 5), (2, 3)) == DrawnShape(dim=0, sizes=(4, 5))
    assert seen_shape((2, 2, 5), (2, 3, 5), (2, 3)) == DrawnShape(dim=1, sizes=(2, 5))
    assert seen_shape((7,), (7,), (2, 3)) == DrawnShape(dim=None, sizes=(7,))
    assert seen_shape((2, 2), (3, 3), (2, 3)) is None
    assert seen_shape((5,), (6,), (2, 3)) is None
