"""The model that the outer optimizer's demonstration trains: a small GPT over bytes, in plain torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional

DATA = "stdlib-text"
"""The standard library's sources."""
LENGTH = 64
"""Bytes of a window that are foretold."""

_VOCABULARY = 256
_HEAD = 32


class _TransformerBlock(nn.Module):
    """Attention to what was before, then two layers; each beside what goes past it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        parts = self.attention(self.norm_1(hidden)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(found.transpose(1, 2).reshape(samples, length, width))
        narrowed: Tensor = self.narrow(functional.gelu(self.widen(self.norm_2(hidden)), approximate="tanh"))
        return hidden + narrowed


class SmallGPT(nn.Module):
    """A GPT over bytes; `(samples, length)` to `(samples, length, 256)`. By default 0.44 million parameters."""

    def __init__(self, *, length: int = LENGTH, width: int = 128, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(_VOCABULARY, width)
            self.positions = nn.Embedding(length, width)
            self.blocks = nn.ModuleList(_TransformerBlock(width, width // _HEAD) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what each place says of the byte after it."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.tokens.weight)


def byte_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss over windows of `length + 1` bytes."""
    said = model(windows[:, :-1])
    return functional.cross_entropy(said.reshape(-1, _VOCABULARY), windows[:, 1:].reshape(-1))
