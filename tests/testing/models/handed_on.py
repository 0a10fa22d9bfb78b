"""Models whose blocks hand on tensors otherwise than as arguments and results: one has to run their own forward."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, WIDTH, CLASSES, DEPTH = 6, 8, 3, 4


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden)


class Tower(nn.Module):
    """What all models here have: something before the blocks, the blocks, and a head that makes logits."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)


def with_batch(model: nn.Module):
    return model, (torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES) % CLASSES), functional.cross_entropy


@dataclass(slots=True)
class State:
    hidden: Tensor
    seen: list[Tensor] = field(default_factory=list)
    count: int = 0


class ChangesState(Mix):
    def forward(self, state: State) -> None:
        state.seen.append(self.linear(state.hidden))
        state.hidden = state.hidden + state.seen[-1]
        state.count += len(state.hidden)


class StateTower(Tower):
    def forward(self, inputs: Tensor) -> Tensor:
        state = State(self.stem(inputs))
        for block in self.blocks:
            block(state)
        return self.head(state.hidden + state.seen[0]) * (1 + state.count / len(inputs))


def a_state_is_changed_along_the_way():
    return with_batch(StateTower(ChangesState))


class Cache:
    """Keys of all blocks so far."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def update(self, key: Tensor) -> Tensor:
        self.keys[len(self.keys)] = key
        return torch.stack(list(self.keys.values())).mean(0)


class Caches(Mix):
    def forward(self, hidden: Tensor, *, cache: Cache | None = None) -> tuple[Tensor, Cache | None]:
        key = self.linear(hidden)
        return hidden + (key if cache is None else cache.update(key)), cache


class CacheTower(Tower):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden, cache = self.stem(inputs), Cache() if self.head.out_features == CLASSES else None
        for block in self.blocks:
            hidden, cache = block(hidden, cache=cache)
        return self.head(hidden)


def a_cache_is_passed_to_each_block():
    return with_batch(CacheTower(Caches))


class KeywordTower(Tower):
    def forward(self, inputs: Tensor) -> Tensor:
        given: dict[str, object] = {"state": State(self.stem(inputs))}
        for block in self.blocks:
            block(**given)
            given["state"] = State(given["state"].hidden * 0.5, given["state"].seen[-1:])
        return self.head(given["state"].hidden + given["state"].seen[0])


def keywords_are_changed_along_the_way():
    return with_batch(KeywordTower(ChangesState))


class HookTower(Tower):
    def __init__(self) -> None:
        super().__init__(Mix)
        self.kept: list[Tensor] = []
        self.blocks[1].register_forward_hook(lambda _module, _args, result: self.kept.append(result))
        self.blocks[2].register_forward_pre_hook(lambda _module, args: (args[0] * 2.0,))

    def forward(self, inputs: Tensor) -> Tensor:
        self.kept.clear()
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + self.kept[0])


def hooks_keep_and_change():
    return with_batch(HookTower())


@dataclass(frozen=True)
class Two:
    hidden: Tensor
    skip: Tensor | None = None


class GivesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, two: Two) -> Two:
        return Two(self.layers(two.hidden + 1.0) + two.hidden, two.skip)


class OwnWeights(Tower):
    """With parameters of its own, glue that writes in place, and a long skip."""

    def __init__(self) -> None:
        super().__init__(GivesTwo)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.arange(WIDTH) / WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.stem(inputs)
        two = Two(first * self.scale, first)
        for block in self.blocks:
            two = block(two)
            two.hidden.add_(self.shift)
        return self.head(functional.relu_(two.hidden) * self.scale + two.skip)


def own_weights_and_writes_in_place():
    return with_batch(OwnWeights())


class Checkpointed(Tower):
    def forward(self, inputs: Tensor) -> Tensor:
        record = Two(self.stem(inputs))
        for block in self.blocks:
            record = Two(torch.utils.checkpoint.checkpoint(block, record.hidden, use_reentrant=False), record.hidden)
        return self.head(record.hidden + record.skip)


def its_own_checkpointing():
    return with_batch(Checkpointed(Mix))


class Turned(torch.autograd.Function):
    """The tensor itself, with its gradient the other way round (Ganin and Lempitsky, 2015)."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Adversarial(Tower):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = Turned.apply(block(hidden))
        return self.head(hidden)


def gradients_are_turned_along_the_way():
    return with_batch(Adversarial(Mix))


class Keeps(Mix):
    def forward(self, two: Two) -> Two:
        self.kept = self.linear(two.hidden)
        return Two(two.hidden + self.kept)


class KeepTower(Tower):
    """Whose blocks keep in themselves what is used later."""

    def forward(self, inputs: Tensor) -> Tensor:
        two = Two(self.stem(inputs))
        for block in self.blocks:
            two = block(two)
        return self.head(two.hidden + self.blocks[0].kept)


def blocks_keep_what_is_used_later():
    return with_batch(KeepTower(Keeps))


class Decides(GivesTwo):
    def forward(self, two: Two) -> Two:
        return super().forward(two) if two.hidden.mean() > 0 else Two(two.hidden, two.skip)


class DecideTower(Tower):
    def forward(self, inputs: Tensor) -> Tensor:
        two = Two(self.stem(inputs))
        for block in self.blocks:
            two = block(two)
        return self.head(two.hidden)


def decides_by_a_mean():
    return with_batch(DecideTower(Decides))


class Balanced(Tower):
    """With a term of all samples together, too small to be seen in the loss."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        own = functional.cross_entropy(self.head(hidden), labels, reduction="none")
        return own + 1e-2 * hidden.softmax(-1).mean(0).square().sum()


def a_small_term_of_all_samples():
    return Balanced(Mix), {"inputs": torch.randn(SAMPLES, WIDTH), "labels": torch.arange(SAMPLES) % CLASSES}


class Drops(ChangesState):
    def __init__(self) -> None:
        super().__init__()
        self.linear.append(nn.Dropout(0.2))

    def forward(self, state: State) -> None:
        super().forward(state)
        state.hidden = functional.dropout(state.hidden, 0.1, self.training)


class DropTower(Tower):
    """Draws in blocks, one of which is called twice, and between them; drops whole layers with probability 0."""

    def __init__(self) -> None:
        super().__init__(Drops)
        self.drop = nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        state = State(self.drop(self.stem(inputs)))
        for block in (*self.blocks[:2], self.blocks[1], *self.blocks[2:]):
            if self.training and torch.rand([]) < 0.0:
                continue
            block(state)
            state.hidden = functional.dropout(state.hidden, 0.2, self.training) + 0.1 * torch.rand_like(state.hidden)
        return self.head(self.drop(state.hidden + state.seen[0]))


def drops_along_the_way():
    return with_batch(DropTower())


class DropsLayers(DropTower):
    def forward(self, inputs: Tensor) -> Tensor:
        state = State(self.stem(inputs))
        for block in self.blocks:
            if self.training and torch.rand([]) < 0.5:
                continue
            block(state)
        return self.head(state.hidden)


def drops_whole_layers():
    return with_batch(DropsLayers())
