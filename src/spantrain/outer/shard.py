"""What one shard holds, and what it does at the master's commands: pushes, means, versions. No network, no clock.

Di-PS, 3.1 and 4.1. Kept: a shard holds some layers' parameters and the outer optimizer's momentum, takes pushes of
several clusters, and tells their norms. Decided here: a new version is made beside the one that is served, and takes
its place whole when the master says so; a push must have this layout's names, shapes and types, and is refused by name
otherwise. In memory are at most five times the parameters in float32, beside pushes and versions that are being pulled:
parameters and velocity as served and as staged, and the mean.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spantrain.core import outer_commands as do
from spantrain.core import outer_events as on
from spantrain.core.outer_events import OuterEvent, Ticket
from spantrain.core.outer_layers import Layer, ParameterSpec, ShardLayout
from spantrain.errors import ProtocolError
from spantrain.outer.numerics import OuterRule, Tensors, nesterov, sum_of_squares, velocity_type, weighted_mean
from spantrain.outer.snapshots import ShardVersion, SnapshotStore

__all__ = ["OuterShard", "ShardCommand"]

ShardCommand = do.CheckPush | do.Forget | do.Measure | do.Combine | do.Stage | do.Commit | do.Restore


_ENDED = 1000
"""Tickets that are remembered as ended, so that layers on their way are dropped."""


class OuterShard:
    """One shard's memory."""

    def __init__(
        self, name: str, layout: ShardLayout, *, snapshots: SnapshotStore, rule: OuterRule | None = None
    ) -> None:
        """Begin with nothing in memory; what is in snapshots is served when the master says which."""
        self._name = name
        self._layout = layout
        self._rule = rule or OuterRule()
        self._snapshots = snapshots
        self._pushes: dict[Ticket, dict[int, Tensors]] = {}
        self._ended: deque[Ticket] = deque(maxlen=_ENDED)
        self._measured: dict[Ticket, tuple[Ticket, ...]] = {}
        self._means: dict[Ticket, dict[str, Tensor]] = {}
        self._staged: tuple[Ticket, ShardVersion] | None = None
        self._versions: dict[int, ShardVersion] = {}
        self._serving: int | None = None

    @property
    def layers(self) -> Mapping[int, Layer]:
        """Its layers, by index."""
        return {k: self._layout.layers[k] for k in self._layout.layers_of(self._name)}

    @property
    def serving(self) -> ShardVersion | None:
        """The version that it serves."""
        return self._versions[self._serving] if self._serving is not None else None

    def registered(self) -> on.ShardRegistered:
        """Forget pushes and means of an earlier connection; return what to register with."""
        self._forget_pushes()
        return on.ShardRegistered(shard=self._name, versions=self.restorable)

    @property
    def restorable(self) -> tuple[int, ...]:
        """Versions that it has, served, kept, staged or in a snapshot."""
        staged = {self._staged[1].version} if self._staged else set()
        return tuple(sorted({*self._versions, *self._snapshots.versions} | staged))

    # Layers in and out.

    def take(self, push: Ticket, layer: int, tensors: Tensors) -> None:
        """Keep one layer of a push.

        Raises:
            ProtocolError: the push has ended, or the layer is not this shard's, or names, shapes or types are not its
                own; nothing is kept.
        """
        if push in self._ended:
            raise ProtocolError(f"{self._name}: push {push} has ended; drop it and train on")
        self._check_layer(layer, tensors, f"{self._name}: push {push}")
        self._pushes.setdefault(push, {})[layer] = tensors

    def give(self, version: int, layer: int) -> Tensors:
        """Return one layer of a version that is served, or was and is kept.

        Raises:
            ProtocolError: it has no such version or layer.
        """
        if version not in self._versions or layer not in self.layers:
            layers, versions = ", ".join(map(str, self.layers)), ", ".join(map(str, sorted(self._versions)))
            raise ProtocolError(
                f"{self._name}: asked for layer {layer} of version {version}; it holds layers {layers} of versions "
                f"{versions or 'none'}"
            )
        held = self._versions[version].parameters
        return {one.name: held[one.name] for one in self.layers[layer].parameters}

    def _check_layer(self, layer: int, tensors: Tensors, what: str) -> None:
        if layer not in self.layers:
            raise ProtocolError(f"{what}: layer {layer} is not held here; send it to {self._layout.shard_of(layer)}")
        _check_tensors(self.layers[layer].parameters, tensors, f"{what}, layer {layer}")

    # Commands.

    def on_command(self, command: ShardCommand) -> OuterEvent | None:
        """Do what the master commands; return the answer. A version that it does not have: registers again."""
        match command:
            case do.CheckPush():
                whole = self._pushes.get(command.push, {}).keys() == self.layers.keys()
                return on.PushChecked(shard=self._name, push=command.push, complete=whole)
            case do.Forget():
                self._forget(command.ticket)
                return None
            case do.Measure():
                self._measured[command.update] = command.pushes
                squares = {push: self._squares(self._pushes[push]) for push in command.pushes}
                return on.NormsMeasured(shard=self._name, update=command.update, squares=squares)
            case do.Combine():
                return self._combine(command)
            case do.Stage():
                self._staged = None
                self._staged = (command.update, self._next(command))
                return on.Staged(shard=self._name, update=command.update)
            case do.Commit():
                return self._commit(command)
            case do.Restore():
                return self._restore(command)

    def _forget(self, ticket: Ticket) -> None:
        self._ended.append(ticket)
        self._pushes.pop(ticket, None)
        self._means.pop(ticket, None)
        self._measured.pop(ticket, None)
        if self._staged and self._staged[0] == ticket:
            self._staged = None

    def _forget_pushes(self) -> None:
        for ticket in [*self._pushes, *self._means]:
            if self._staged is None or self._staged[0] != ticket:
                self._forget(ticket)

    def _squares(self, layers: Mapping[int, Tensors]) -> tuple[float, ...]:
        return tuple(
            sum_of_squares([layers[k][one.name] for one in layer.parameters]) for k, layer in self.layers.items()
        )

    def _combine(self, command: do.Combine) -> on.MeanCombined:
        mean = {
            one.name: weighted_mean(
                [(weight.part, self._pushes[weight.push][k][one.name]) for weight in command.weights]
            )
            for k, layer in self.layers.items()
            for one in layer.parameters
        }
        self._means[command.update] = mean
        squares = self._squares(dict.fromkeys(self.layers, mean))
        return on.MeanCombined(shard=self._name, update=command.update, squares=squares)

    def _next(self, command: do.Stage) -> ShardVersion:
        """Make a version: a push's tensors as they are, or a step along the mean."""
        if command.parameters:
            held = self._pushes[command.parameters]
            first = {name: tensor.clone() for k in self.layers for name, tensor in held[k].items()}
            still = {
                name: torch.zeros_like(tensor, dtype=velocity_type(tensor.dtype)) for name, tensor in first.items()
            }
            return ShardVersion(version=command.version, parameters=first, velocity=still)
        before, means = self.serving, self._means.pop(command.update)
        assert before is not None, "the master stages a step only where a version is served"
        parameters: dict[str, Tensor] = {}
        velocity: dict[str, Tensor] = {}
        for name in list(means):
            step = means.pop(name).mul_(command.scale)
            parameters[name], velocity[name] = nesterov(
                before.parameters[name], step, before.velocity[name], self._rule
            )
        return ShardVersion(version=command.version, parameters=parameters, velocity=velocity)

    def _commit(self, command: do.Commit) -> on.Committed:
        assert self._staged is not None, "the master commits only what is staged"
        _, staged = self._staged
        assert staged.version == command.version
        for ticket in (*self._measured.get(command.update, ()), command.update):
            self._forget(ticket)
        self._versions = {version: self._versions[version] for version in command.keep if version in self._versions}
        self._serve(staged)
        return on.Committed(shard=self._name, version=command.version, versions=self.restorable)

    def _restore(self, command: do.Restore) -> OuterEvent:
        source = self._find(command.source)
        if source is None:
            return self.registered()
        self._versions = {}
        self._serve(replace(source, version=command.version))
        self._forget_pushes()
        return on.Restored(shard=self._name, version=command.version, versions=self.restorable)

    def _find(self, version: int) -> ShardVersion | None:
        """Return a version from memory or from a snapshot."""
        if self._staged and self._staged[1].version == version:
            return self._staged[1]
        if version in self._versions:
            return self._versions[version]
        found = self._snapshots.load(version)
        if found is None:
            return None
        specs = [one for layer in self.layers.values() for one in layer.parameters]
        what = f"{self._name}: snapshot of version {version}"
        _check_tensors(specs, found.parameters, what)
        kept = [replace(one, dtype=_text(velocity_type(found.parameters[one.name].dtype))) for one in specs]
        _check_tensors(kept, found.velocity, f"{what}, velocity")
        return found

    def _serve(self, version: ShardVersion) -> None:
        self._versions[version.version] = version
        self._serving, self._staged = version.version, None


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensors(specs: Sequence[ParameterSpec], tensors: Tensors, what: str) -> None:
    wanted = {one.name: f"{one.dtype} of shape {one.shape}" for one in specs}
    got = {name: f"{_text(one.dtype)} of shape {tuple(one.shape)}" for name, one in tensors.items()}
    if got == wanted:
        return
    unlike = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    told = "; ".join(f"{name}: got {got.get(name, 'none')}, wanted {wanted.get(name, 'none')}" for name in unlike[:4])
    more = f"; and {len(unlike) - 4} more" if len(unlike) > 4 else ""
    raise ProtocolError(f"{what}: {told}{more}; the cluster's model must have the parameters that the shards hold")
