"""A master, shards and clusters of one process that hold real tensors; every message arrives at once."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import TransferWay
from spantrain.core.outer.layers import Layer, ParameterSpec, divide
from spantrain.outer.policy.master import OuterMaster
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.shard import OuterShard
from spantrain.outer.shard.snapshots import SnapshotStore
from spantrain_studies.outer.plain import MemorySnapshots

Tensors = Mapping[str, Tensor]


def layers_of(parameters: Tensors) -> tuple[Layer, ...]:
    """Layers by the first part of the names, as `0.weight` is of layer 0."""
    names: dict[str, list[str]] = {}
    for name in parameters:
        names.setdefault(name.split(".")[0], []).append(name)
    return tuple(
        Layer(name=layer, parameters=tuple(ParameterSpec(name=n, shape=tuple(parameters[n].shape)) for n in inside))
        for layer, inside in names.items()
    )


class MadeUpRounds:
    """Whole rounds, one after the other; a cluster is what it last pulled."""

    def __init__(
        self, parameters: Tensors, clusters: Sequence[str], *, shards: int, rule: Nesterov | None = None,
        settings: OuterSettings | None = None, snapshots: Mapping[str, SnapshotStore] | None = None,
    ) -> None:  # fmt: skip
        self.layout = divide(layers_of(parameters), [f"s{k}" for k in range(shards)])
        self.now_s = 0.0
        self.master = OuterMaster(self.layout, settings or OuterSettings(), now_s=0.0)
        self.shards = {
            name: OuterShard(name, self.layout, rule=rule, snapshots=(snapshots or {}).get(name) or MemorySnapshots())
            for name in self.layout.shards
        }
        self.start: dict[str, dict[str, Tensor]] = {name: dict(parameters) for name in clusters}
        """By cluster: the parameters that its round began with."""
        self.base = dict.fromkeys(clusters, 0)
        self.refused: list[str] = []
        self._sending: dict[Any, Tensors] = {}
        self._left: dict[Any, int] = {}
        for shard in self.shards.values():
            self.tell(shard.registered())
        every = {"w": tuple(range(len(self.layout.layers)))}
        for name in clusters:
            self.tell(on.ClusterRegistered(cluster=name, workers=every))
            self.tell(on.TrainingBegun(cluster=name))
        self.push(clusters[0], parameters, tokens=0)

    def push(self, cluster: str, tensors: Tensors, *, tokens: int) -> None:
        """Push a pseudo-gradient, or the first parameters."""
        self._pushed = tensors
        self.tell(on.PushAsked(cluster=cluster, base_version=self.base[cluster], tokens=tokens))

    def end_window(self) -> None:
        """Let the time of grace pass."""
        self.now_s += 2.0
        for name, shard in self.shards.items():
            self.tell(on.ShardBeat(shard=name, versions=shard.restorable))
        for name in self.start:
            self.tell(on.ClusterBeat(cluster=name))

    def tell(self, event: Any) -> None:
        events = deque([event])
        while events:
            for command in self.master.on_event(self.now_s, events.popleft()):
                events += self._do(command)

    def _do(self, command: Any) -> list[Any]:
        match command:
            case do.StartPush():
                self._sending[command.push] = self._pushed
                self._left[command.push] = len(self.layout.layers)
            case do.RefusePush() | do.SkipRound():
                self.refused.append(command.reason)
            case do.StartPull():
                self.base[command.cluster] = command.version
            case do.Move(way=TransferWay.PUSH):
                return self._move_up(command)
            case do.Move(way=TransferWay.PULL):
                layer = self.shards[command.transfer.shard].give(command.version, command.transfer.layer)
                self.start[command.transfer.cluster] |= layer
                return [on.Moved(way=TransferWay.PULL, transfer=command.transfer)]
            case do.ToShard():
                answer = self.shards[command.shard].on_command(command)
                return [answer] if answer else []
        return []

    def _move_up(self, command: do.Move) -> list[Any]:
        transfer = command.transfer
        tensors = self._sending[transfer.ticket]
        names = [one.name for one in self.layout.layers[transfer.layer].parameters]
        self.shards[transfer.shard].take(transfer.ticket, transfer.layer, {name: tensors[name] for name in names})
        self._left[transfer.ticket] -= 1
        moved = on.Moved(way=TransferWay.PUSH, transfer=transfer)
        if self._left[transfer.ticket]:
            return [moved]
        return [moved, on.PushSent(cluster=transfer.cluster, push=transfer.ticket)]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What all shards serve."""
        return {name: one for shard in self.shards.values() for name, one in shard.serving.parameters.items()}


def random_tensors(seed: int, *, scale: float = 1.0) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (2, 4), "2.weight": (5,), "3.weight": (3, 3)}
    return {name: scale * torch.randn(shape, generator=chance) for name, shape in shapes.items()}


def without_clip() -> OuterSettings:
    return replace(OuterSettings(), clip_norm=None)
