"""Models as users write them, each with a function that returns it, an example batch, and perhaps a loss."""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, TOKENS, WIDTH, WORDS = 6, 5, 8, 11


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (SAMPLES, TOKENS))


def token_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(dim=1)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


# --- a mixture of experts, every expert computed for every token, the two best of them counted


class Experts(nn.Module):
    def __init__(self, count: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count))

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.router(hidden).softmax(dim=-1)
        best, which = weights.topk(self.chosen, dim=-1)
        gates = torch.zeros_like(weights).scatter(-1, which, best / best.sum(dim=-1, keepdim=True))
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-1)
        return hidden + (outputs * gates.unsqueeze(-2)).sum(dim=-1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Feed(), Experts(), Feed(), Experts()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def mixture():
    words = tokens()
    return Mixture(), (words, words.roll(1, 1)), token_losses


# --- one tensor carried in an unusual place each: tokens first, windows beside the samples, a bias made of parameters,
# --- a mask made of the data, a parameter of the model itself, and writing into what came from the stage before


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.register_buffer("ramp", torch.linspace(0.0, 1.0, TOKENS))
        self.first = nn.ModuleList([Feed(), Feed()])
        self.second = nn.ModuleList([Feed(), Feed()])
        self.third = nn.ModuleList([Feed(), Feed()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        samples = words.shape[0]
        bias = self.bias.cumsum(0)
        seen = (words != 3).unsqueeze(-1)
        hidden = self.embedding(words).transpose(0, 1) * self.scale
        for block in self.first:
            hidden = block(hidden) + bias.unsqueeze(1)
        hidden = hidden.transpose(0, 1).reshape(samples * TOKENS, WIDTH)
        for block in self.second:
            hidden = block(hidden)
            hidden[:, 0] = 0.5
            hidden += 0.25
        hidden = hidden.view(samples, TOKENS, WIDTH).masked_fill(~seen, 0.0)
        for block in self.third:
            hidden = block(hidden) * self.ramp[:, None] + bias
        return {"logits": self.head(hidden)}


def unusual():
    words = tokens()
    return Unusual(), {"words": words, "labels": words.flip(1)}, lambda outputs, labels: token_losses(
        outputs["logits"], labels
    )  # fmt: skip


# --- a model that computes its own loss of its labels, and uses one layer three times


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.again = Feed()
        self.blocks = nn.ModuleList([Feed(), Feed()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(self.again(hidden))
        logits = self.head(self.again(hidden))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def own_loss():
    words = tokens()
    return OwnLoss(), {"words": words, "labels": words.roll(1, 1)}


# --- a plain chain of layers


def chain():
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True),
              nn.Linear(WIDTH, 3)]  # fmt: skip
    inputs = torch.randn(SAMPLES, WIDTH)
    loss = functional.cross_entropy
    return nn.Sequential(*layers), (inputs, torch.arange(SAMPLES) % 3), loss


GOOD = ("labels_used_early", "mixture", "unusual", "own_loss", "chain")


# --- models that cannot be trained exactly in parts, and functions that go wrong


class Decides(nn.Module):
    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.blocks = nn.ModuleList([Feed(), Judge() if inside else Feed()])

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        if not self.inside and hidden.sum() > 0:
            hidden = -hidden
        return hidden


class Judge(Feed):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if hidden.mean() > 0 else hidden


def square(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().flatten(1).mean(dim=1)


def hidden_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, TOKENS, WIDTH), torch.randn(SAMPLES, TOKENS, WIDTH)


def decides():
    return Decides(inside=False), hidden_batch(), square


def decides_inside():
    return Decides(inside=True), hidden_batch(), square


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feed(), Feed()])

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden - hidden.mean(dim=0)


def pairs():
    return Pairs(), hidden_batch(), square


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feed(), Feed()])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.blocks[0](hidden) + torch.randn_like(hidden)
        return self.blocks[1](hidden)


def noisy():
    return Noisy(), hidden_batch(), square


class NoisyElsewhere(Feed):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * random.random()


def noisy_elsewhere():
    model = Noisy()
    model.blocks[0] = NoisyElsewhere()
    return model, hidden_batch(), square


class OneMore(Feed):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * torch.rand(hidden.shape[0] + 1)[1:, None, None]


def chosen_tokens():
    model = Noisy()
    model.blocks[0] = OneMore()
    return model, hidden_batch(), square


def raises():
    raise KeyError("no such width")


def fails():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), hidden_batch(), square


def no_loss_today(outputs, labels):
    raise RuntimeError("no loss today")


def loss_raises():
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 3)), hidden_batch(), no_loss_today


def returns_a_module():
    return Feed()


def batch_of_text():
    return Feed(), ["some", "words"], square


def unequal_samples():
    return Feed(), (torch.randn(4, WIDTH), torch.randn(5, WIDTH)), square


def no_loss():
    return Feed(), torch.randn(4, WIDTH)


def labels_used_early():
    return EarlyLabels(), {"words": tokens(), "labels": tokens()}


class EarlyLabels(OwnLoss):
    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(words + labels - labels, labels)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(Feed() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def sparse_words():
    words = tokens()
    return Words(), (words, words), token_losses


class WritesOver(Feed):
    def forward(self, hidden: Tensor) -> Tensor:
        found = self.up(hidden).relu_()
        found += 1
        return hidden + self.down(found)


def written_over():
    return nn.Sequential(WritesOver(), Feed()), hidden_batch(), square


class AsksForGradients(Feed):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.detach().requires_grad_()
        found = super().forward(hidden)
        return torch.autograd.grad(found.sum(), hidden, create_graph=True)[0]


def wants_gradients():
    return nn.Sequential(AsksForGradients(), Feed()), hidden_batch(), square


class WeighedSamples(nn.Module):
    """Its loss is over what the samples of a batch weigh together."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Feed(), Feed())

    def forward(self, hidden: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        each = (self.blocks(hidden) - labels).square().flatten(1).mean(1)
        return (each * weights).sum() / weights.sum()


def weighed_samples():
    """An example batch as people write them: nothing in it tells one sample from another."""
    hidden, _ = hidden_batch()
    alike = torch.zeros_like(hidden)
    return WeighedSamples(), {"hidden": alike, "weights": torch.ones(len(alike)), "labels": torch.ones_like(alike)}
