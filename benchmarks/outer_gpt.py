"""A small GPT on real text, and how clusters train copies of it: what `outer_convergence.py` computes with.

The text is the standard library's sources as bytes, as in `make demo`; held out are other files. Every cluster has its
own AdamW and its own order of the text; the learning rate falls with the steps of all clusters together, so that at the
same tokens all methods have the same. All runs of a seed begin with the same parameters, trained a little in one
process: DiLoCo's authors begin so too, and the first few hundred steps would say more of the rate than of the method.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout, fragment_layers
from spantrain.formats.registry import WireFormat
from spantrain.models.data.text import read_windows
from spantrain.outer.client.replica import ClusterCopy, TakenPush
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.shard import OuterShard
from spantrain_studies.outer.plain import MemorySnapshots

WINDOW, VOCABULARY, WIDTH, BLOCKS, HEADS = 32, 256, 168, 3, 6
HELD_OUT_WINDOWS = 256
WARM_UP_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How copies are trained."""

    batch: int = 4
    learning_rate: float = 5e-4
    lowest_rate: float = 0.02
    """Of it, at the end."""
    begun_steps: int = 1500
    """Before there are clusters."""
    begun_rate: float = 1e-3
    rule: Nesterov = field(default_factory=Nesterov)

    @property
    def tokens_per_step(self) -> int:
        """Of an inner step."""
        return self.batch * WINDOW


class Block(nn.Module):
    """Attention and two layers, each behind a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what comes out of `(samples, tokens, width)`, of the same shape."""
        samples, tokens, _ = hidden.shape
        parts = self.attend(self.first(hidden)).view(samples, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(samples, tokens, WIDTH))
        return hidden + self.narrow(functional.gelu(self.wide(self.second(hidden)), approximate="tanh"))


class SmallGpt(nn.Module):
    """Bytes to the next byte, 1.06 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * BLOCKS) if deep else 1.0))

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean loss of `(samples, tokens + 1)` bytes."""
        hidden = self.token(windows[:, :-1]) + self.place.weight
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.last(hidden) @ self.token.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@cache
def windows_of(*, held_out: bool) -> Tensor:
    """Return int64 `(windows, tokens + 1)`."""
    rows = torch.from_numpy(read_windows("stdlib-text", WINDOW, held_out=held_out).rows.astype("int64"))
    return rows[:: len(rows) // HELD_OUT_WINDOWS][:HELD_OUT_WINDOWS] if held_out else rows


@torch.no_grad()
def held_out_loss(parameters: Mapping[str, Tensor]) -> float:
    """Return the mean loss on text that nobody trains on."""
    model = SmallGpt()
    model.load_state_dict(dict(parameters))
    return float(model(windows_of(held_out=True)))


def layers_of(parameters: Mapping[str, Tensor]) -> tuple[Layer, ...]:
    """Return a layer for each block, and for what is before and behind them."""
    names: dict[str, list[str]] = {}
    for name in parameters:
        names.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0], []).append(
            name
        )
    return tuple(
        Layer(name=layer, parameters=tuple(ParameterSpec(name=n, shape=tuple(parameters[n].shape)) for n in inside))
        for layer, inside in names.items()
    )


class Progress:
    """Steps that all clusters have taken, of all that they will."""

    def __init__(self, recipe: Recipe, steps: int) -> None:
        self._recipe, self._steps, self._taken = recipe, steps, 0

    def next_rate(self) -> float:
        """Return the learning rate of the next step."""
        self._taken += 1
        part = min(1.0, self._taken / self._steps)
        low = self._recipe.lowest_rate
        return self._recipe.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * part)) / 2)


class Copy:
    """One copy of the model that is trained."""

    def __init__(self, start: Mapping[str, Tensor], recipe: Recipe, seed: str, progress: Progress) -> None:
        self.model = SmallGpt()
        self.model.load_state_dict(dict(start))
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        self._recipe, self._progress = recipe, progress
        self._optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self._chance = torch.Generator().manual_seed(int.from_bytes(seed.encode()[-7:], "big"))
        self._steps = 0

    def gradients(self) -> None:
        """Find the gradients of the next batch."""
        rows = windows_of(held_out=False)
        chosen = torch.randint(len(rows), (self._recipe.batch,), generator=self._chance)
        self._optimizer.zero_grad(set_to_none=True)
        self.model(rows[chosen]).backward()

    def update(self) -> None:
        """Step along them."""
        self._steps += 1
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        warm = min(1.0, self._steps / WARM_UP_STEPS)
        self._optimizer.param_groups[0]["lr"] = warm * self._progress.next_rate()
        self._optimizer.step()

    def step(self) -> None:
        """Take an inner step."""
        self.gradients()
        self.update()


@cache
def begun(recipe: Recipe, seed: int) -> Mapping[str, Tensor]:
    """Return the parameters that all runs of a seed begin with."""
    torch.manual_seed(seed)
    start = {name: one.detach().clone() for name, one in SmallGpt().named_parameters()}
    recipe = replace(recipe, learning_rate=recipe.begun_rate)
    alone = Copy(start, recipe, f"{seed} begun", Progress(recipe, 10 * recipe.begun_steps))
    for _ in range(recipe.begun_steps):
        alone.step()
    return {name: one.detach().clone() for name, one in alone.parameters.items()}


class GptCluster:
    """A cluster's body for the simulator: trains, keeps what it pushes, takes versions in."""

    def __init__(self, copy: Copy, layers: Sequence[Layer], spoil: str, seed: int) -> None:
        self._copy, self._layers, self._spoil = copy, layers, spoil
        self._outer = ClusterCopy(copy.parameters)
        self._taken: TakenPush | None = None
        self._chance = torch.Generator().manual_seed(seed)

    def part(self, number: int, count: int) -> "GptCluster":
        """Return a fragment of it, over the same parameters."""
        part = GptCluster(self._copy, fragment_layers(self._layers, number, count), self._spoil, number)
        names = {one.name for layer in part._layers for one in layer.parameters}
        part._outer = ClusterCopy({name: one for name, one in self._copy.parameters.items() if name in names})
        return part

    def step(self) -> None:
        """Take an inner step."""
        self._copy.step()

    def keep(self) -> None:
        """Remember what there is to push."""
        self._taken = self._outer.take()

    def layer(self, index: int, wire_format: WireFormat, /, *, parameters: bool) -> dict[str, Tensor]:
        """Return tensors by name; what a spoiled cluster sends is no gradient."""
        taken, specs = self._taken, self._layers[index].parameters
        assert taken
        if parameters:
            return taken.tensors(specs, parameters=True)
        if self._spoil:
            spoiled = {one.name: self._spoiled(taken.start[one.name] - taken.now[one.name]) for one in specs}
            taken = replace(taken, now={name: taken.start[name] - one for name, one in spoiled.items()})
        return taken.tensors(specs, wire_format)

    def _spoiled(self, gradient: Tensor) -> Tensor:
        size = float(gradient.square().mean().sqrt())
        match self._spoil:
            case "noise":
                return torch.randn(gradient.shape, generator=self._chance) * size
            case "loud noise":
                return torch.randn(gradient.shape, generator=self._chance)
            case "huge":
                return gradient * 1e6
            case "nan":
                return gradient * math.nan
        return gradient

    def skipped(self) -> None:
        """Train on."""
        self._outer.skipped()

    def pulled(self, layers: Mapping[int, Mapping[str, Tensor]], *, counted: bool, left_out: bool) -> None:
        """Begin a round."""
        version = {name: one for layer in layers.values() for name, one in layer.items()}
        self._outer.pulled(version, counted=counted, left_out=left_out)


class GptShard(OuterShard):
    """A shard's body: the one that trains, with snapshots in memory."""

    def __init__(self, name: str, layout: ShardLayout, recipe: Recipe, store: MemorySnapshots) -> None:
        super().__init__(name, layout, snapshots=store, rule=recipe.rule)
        self._store = store

    def snapshot(self) -> None:
        """Keep what is served."""
        if self.serving is not None:
            self._store.save(self.serving)


def as_tensors(found: Any) -> dict[str, Tensor]:
    """Return what shards serve together."""
    return {name: one for shard in found for name, one in shard.serving.parameters.items()}
