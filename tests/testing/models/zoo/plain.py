"""Models of plain torch, as people write them."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SAMPLES, TOKENS, WIDTH, WORDS, KINDS = 6, 9, 24, 32, 3


def _rows() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES) % KINDS


def _texts() -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (SAMPLES, TOKENS))
    return words, words.roll(-1, 1)


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class MLP(nn.Module):
    def __init__(self, depth: int = 4, chance: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.drop = nn.Dropout(chance)
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.drop(functional.relu(layer(hidden)))
        return self.head(hidden)


def mlp():
    return MLP(), _rows(), functional.cross_entropy


def mlp_with_a_loss_module():
    return MLP(), _rows(), nn.CrossEntropyLoss()


def dropout():
    return MLP(chance=0.3), _rows(), functional.cross_entropy


def compiled():
    return torch.compile(MLP()), _rows(), functional.cross_entropy


class AlwaysDrops(MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = functional.dropout(functional.relu(layer(hidden)), 0.2)
        return self.head(hidden)


def dropout_always():
    return AlwaysDrops(), _rows(), functional.cross_entropy


class Gated(nn.Linear):
    """Says its scale, which has no number where parameters have none."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def __repr__(self) -> str:
        return f"Gated({self.scale.item():.3f})"

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(super().forward(hidden)) * self.scale


def layers_that_say_numbers():
    return nn.Sequential(*(Gated() for _ in range(4)), nn.Linear(WIDTH, KINDS)), _rows(), functional.cross_entropy


class LSTM(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=batch_first) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words if self.batch_first else words.t())
        for layer in self.layers:
            found, _ = layer(hidden)
            hidden = hidden + found
        logits = self.head(hidden)
        return logits if self.batch_first else logits.transpose(0, 1)


def lstm():
    return LSTM(batch_first=True), _texts(), _token_loss


def lstm_with_tokens_first():
    return LSTM(batch_first=False), _texts(), _token_loss


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 4, 4, 48, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, read: Tensor, written: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(written.shape[1])
        return self.head(self.transformer(self.embedding(read), self.embedding(written), tgt_mask=mask))


def torch_transformer():
    read, _ = _texts()
    written, labels = _texts()
    return Translator(), (read, written, labels), _token_loss


class Attentive(nn.Module):
    """Whose attention gives its weights, of which some are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(WIDTH, 4, dropout=0.3), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        turned = hidden.transpose(0, 1)
        mixed, weights = self.attention(turned, turned, turned)
        return hidden + self.last(mixed.transpose(0, 1)) * (1 + weights.square().sum(dim=-1, keepdim=True))


def torch_attention():
    layers = [nn.Embedding(WORDS, WIDTH), *(Attentive() for _ in range(4)), nn.Linear(WIDTH, WORDS)]
    return nn.Sequential(*layers), _texts(), _token_loss


class Autoencoder(nn.Module):
    """Whose decoder has the encoder's weights, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((WIDTH, 16), (16, 12), (12, 8), (8, 4)))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        for layer in reversed(self.layers):
            hidden = torch.tanh(functional.linear(hidden, layer.weight.t()))
        return hidden


def tied_autoencoder():
    inputs, _ = _rows()
    return Autoencoder(), (inputs, inputs.clone()), functional.mse_loss


class VAE(nn.Module):
    """Whose noise is an input, so that it can be had again."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
        self.mean, self.scale = nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, inputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(inputs)
        mean, scale = self.mean(hidden), self.scale(hidden)
        return self.decoder(mean + noise * (scale / 2).exp()), mean, scale


def _vae_loss(outputs: tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
    made, mean, scale = outputs
    return functional.mse_loss(made, labels) - 0.5 * (1 + scale - mean.square() - scale.exp()).mean()


def vae():
    inputs, _ = _rows()
    return VAE(), (inputs, torch.randn(SAMPLES, 4), inputs.clone()), _vae_loss


class DrawsNoise(VAE):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(inputs, torch.randn(inputs.shape[0], 4))


def vae_that_draws():
    inputs, _ = _rows()
    return DrawsNoise(), (inputs, inputs.clone()), _vae_loss


class Experts(nn.Module):
    """Each word goes to the two best of four, and only there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        words = self.norm(hidden).flatten(0, 1)
        gates, chosen = self.router(words).softmax(-1).topk(2, dim=-1)
        made = torch.zeros_like(words)
        for number, expert in enumerate(self.experts):
            word, place = torch.where(chosen == number)
            if word.numel() == 0:
                continue
            made = made.index_add(0, word, expert(words[word]) * gates[word, place, None])
        return hidden + made.view_as(hidden)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def mixture():
    return Mixture(), _texts(), _token_loss


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class ClipsLargeOnes(Feed):
    """Looks at the numbers of its own block, sample by sample."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.stack(
            [0.5 * one if one.norm() > 5 else super(ClipsLargeOnes, self).forward(one) for one in hidden]
        )


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module, again: bool = False) -> None:
        super().__init__()
        self.blocks, self.head, self.again = nn.ModuleList(blocks), nn.Linear(WIDTH, KINDS), again

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.again else block(hidden)
        return self.head(hidden)


def own_checkpointing():
    return Chain(*(Feed() for _ in range(4)), again=True), _rows(), functional.cross_entropy


def branches_on_data():
    return Chain(Feed(), ClipsLargeOnes(), Feed(), Feed()), _rows(), functional.cross_entropy


class BranchesOnABatch(Feed):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if hidden.mean() > 0 else hidden


def branches_on_a_batch():
    return Chain(Feed(), BranchesOnABatch(), Feed(), Feed()), _rows(), functional.cross_entropy


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Feed() for _ in range(4))
        self.right = nn.ModuleList(Feed() for _ in range(4))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            one, other = left(one), right(other)
        return functional.normalize(one, dim=1) @ functional.normalize(other, dim=1).t()


def _pairs_in_common(scores: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _like_ones_attract(features: Tensor, kinds: Tensor) -> Tensor:
    """The supervised contrastive loss (Khosla et al., 2020), and a little that two samples learn of, too."""
    normal = functional.normalize(features, dim=1)
    itself = torch.eye(len(normal), dtype=torch.bool, device=normal.device)
    scores = (normal @ normal.t() / 0.1).masked_fill(itself, -1e9)
    same = (kinds[:, None] == kinds[None]) & ~itself
    attraction = -(scores.log_softmax(dim=1) * same).sum(dim=1).div(same.sum(dim=1).clamp(min=1)).mean()
    return attraction + 0.01 * features.square().mean()


def contrastive():
    inputs, _ = _rows()
    return Siamese(), (inputs, inputs + 0.1 * torch.randn_like(inputs), torch.arange(SAMPLES)), _pairs_in_common


def contrastive_by_kinds():
    inputs, _ = _rows()
    return Chain(*(Feed() for _ in range(4))), (inputs, torch.arange(SAMPLES) % 2), _like_ones_attract


def contrastive_with_numbers_of_rows():
    """The labels number rows of the whole batch."""
    inputs, _ = _rows()
    batch = (inputs, inputs + 0.1 * torch.randn_like(inputs), torch.arange(SAMPLES))
    return Siamese(), batch, functional.cross_entropy


def summed():
    return MLP(), _rows(), lambda logits, kinds: functional.cross_entropy(logits, kinds, reduction="sum")


class Near(nn.Module):
    """A learned bias of how far apart two tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.by_distance = nn.Embedding(TOKENS, 1)

    def forward(self, tokens: int) -> Tensor:
        places = torch.arange(tokens)
        return self.by_distance((places[:, None] - places[None, :]).abs()).squeeze(-1)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, bias: nn.Module) -> Tensor:
        scores = self.query(hidden) @ hidden.mT / WIDTH**0.5 + bias(hidden.shape[1])
        return hidden + self.mix(scores.softmax(-1) @ hidden)


class HandsAModuleOn(nn.Module):
    """Its layers share a module that they are called with, as in x-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.near = Near()
        self.layers = nn.ModuleList(Looking() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden, self.near)
        return self.head(hidden)


def hands_a_module_on():
    return HandsAModuleOn(), _texts(), _token_loss


class Policy(MLP):
    def forward(self, hidden: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=super().forward(hidden))


def gives_a_distribution():
    return Policy(), _rows(), lambda choices, taken: -choices.log_prob(taken)


class DrawsOfOne(VAE):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(inputs)
        mean, scale = self.mean(hidden), self.scale(hidden)
        return self.decoder(torch.distributions.Normal(mean, (scale / 2).exp()).rsample()), mean, scale


def vae_that_draws_of_a_distribution():
    inputs, _ = _rows()
    return DrawsOfOne(), (inputs, inputs.clone()), _vae_loss
