"""What one shard holds, and what it does at the master's commands: pushes, means, versions. No network, no clock.

Di-PS, 3.1 and 4.1. Kept: a shard holds some layers' parameters and the outer optimizer's momentum, takes pushes of
several clusters, and tells their norms. Decided here: a new version is made beside the one that is served, and takes
its place whole when the master says so; a push must have this layout's names, shapes and types, and is refused by name
otherwise. A push is measured when it is taken, so beside what else comes. The mean is made in the memory of the first
push, and the new velocity in that of the mean. So in memory are three times the parameters in float32 (served
parameters and velocity, staged parameters) beside pushes, and twice more while an older version is being written down
or pulled; where pushes are corrected for what came since they began, once more for each version that they begin from.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import OuterEvent, Ticket
from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout
from spantrain.errors import ConfigError, ProtocolError
from spantrain.formats.registry import WireFormat
from spantrain.formats.tensor_bytes import dtype_name
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule
from spantrain.outer.shard import numerics
from spantrain.outer.shard.snapshots import ShardVersion, SnapshotStore
from spantrain.transport.layers.copiers import BufferPool, LayerBytes
from spantrain.transport.layers.departures import specs_of
from spantrain.transport.layers.format import unlike

ShardCommand = do.CheckPush | do.Forget | do.Measure | do.Combine | do.StageVersion | do.Commit | do.Restore


_ENDED = 1000
"""Tickets that are remembered as ended, so that layers on their way are dropped."""


class OuterShard:
    """One shard's memory.

    Commands are for one thread at a time; layers may be taken and given by others meanwhile.
    """

    def __init__(
        self, name: str, layout: ShardLayout, *, snapshots: SnapshotStore, rule: OuterRule | None = None,
        pool: BufferPool | None = None,
    ) -> None:  # fmt: skip
        """Begin with nothing in memory; what is in snapshots is served when the master says which."""
        self._name = name
        self._layout = layout
        self.layers: Mapping[int, Layer] = {k: layout.layers[k] for k in layout.layers_of(name)}
        """Its own, by index."""
        self._rule = rule or Nesterov()
        self._snapshots = snapshots
        self._pool = pool or BufferPool()
        self._lock = threading.Lock()
        """Of pushes, what has ended, and versions; never held while numbers are worked on."""
        self._pushes: dict[Ticket, dict[int, numerics.Tensors]] = {}
        self._sums: dict[Ticket, dict[int, float]] = {}
        """Of squares, by push and layer."""
        self._ended: deque[Ticket] = deque(maxlen=_ENDED)
        self._measured: dict[Ticket, tuple[Ticket, ...]] = {}
        self._means: dict[Ticket, dict[str, Tensor]] = {}
        self._staged: tuple[Ticket, ShardVersion] | None = None
        self._versions: dict[int, ShardVersion] = {}
        self._serving: int | None = None
        self._bases: dict[int, numerics.Tensors] = {}
        """Parameters of versions that clusters began from, where pushes are corrected for what came since."""

    @property
    def serving(self) -> ShardVersion | None:
        """The version that it serves."""
        with self._lock:
            return self._versions[self._serving] if self._serving is not None else None

    def registered(self) -> on.ShardRegistered:
        """Forget pushes and means of an earlier connection; return what to register with."""
        self._forget_pushes()
        return on.ShardRegistered(shard=self._name, versions=self.restorable)

    @property
    def restorable(self) -> tuple[int, ...]:
        """Versions that it has, served, kept, staged or in a snapshot."""
        with self._lock:
            staged = {self._staged[1].version} if self._staged else set()
            return tuple(sorted({*self._versions, *self._snapshots.versions} | staged))

    # Layers in and out.

    def take(
        self, push: Ticket, layer: int, tensors: numerics.Tensors, wire_format: WireFormat = WireFormat.NATIVE
    ) -> None:  # fmt: skip
        """Keep one layer of a push; its tensors are the shard's from now on, which will change them.

        Of what was sent rounded it keeps, and measures, what that comes to.

        Raises:
            ProtocolError: the push has ended, or the layer is not this shard's, or names, shapes or types are not its
                own; nothing is kept.
        """
        self._check_open(push)
        what = f"{self._name}: push {push}"
        if layer not in self.layers:
            raise ProtocolError(f"{what}: layer {layer} is not held here; send it to {self._layout.shard_of(layer)}")
        _check_tensors(self.layers[layer].sent_as(wire_format), tensors, f"{what}, layer {layer}")
        tensors = self._unrounded(self.layers[layer], tensors, wire_format)
        squares = numerics.sum_of_squares([tensors[one.name] for one in self.layers[layer].parameters])
        with self._lock:
            self._check_open(push)
            self._pushes.setdefault(push, {})[layer] = tensors
            self._sums.setdefault(push, {})[layer] = squares

    def _check_open(self, push: Ticket) -> None:
        if push in self._ended:
            raise ProtocolError(f"{self._name}: push {push} has ended; drop it and train on")

    def give(self, version: int, layer: int) -> numerics.Tensors:
        """Return one layer of a version that is served, or was and is kept.

        Raises:
            ProtocolError: it has no such version or layer.
        """
        with self._lock:
            held = self._versions.get(version)
            versions = ", ".join(map(str, sorted(self._versions)))
        if held is None or layer not in self.layers:
            layers = ", ".join(map(str, self.layers))
            raise ProtocolError(
                f"{self._name}: asked for layer {layer} of version {version}; it holds layers {layers} of versions "
                f"{versions or 'none'}"
            )
        return {one.name: held.parameters[one.name] for one in self.layers[layer].parameters}

    def _unrounded(self, layer: Layer, tensors: numerics.Tensors, wire_format: WireFormat) -> numerics.Tensors:
        if layer.sent_as(wire_format) == layer.parameters:
            return tensors
        room = self._room(layer)
        return {
            one.name: numerics.unrounded(one, wire_format, tensors[one.name], room[one.name])
            if one.sent_as(wire_format) != one
            else tensors[one.name]
            for one in layer.parameters
        }

    # Commands.

    def on_command(self, command: ShardCommand) -> OuterEvent | None:
        """Do what the master commands; return the answer. A version that it does not have: registers again.

        Raises:
            ProtocolError: it lacks what it is to work on.
            ConfigError: the snapshot that it is to restore is of another model.
        """
        match command:
            case do.CheckPush():
                whole = self._pushes.get(command.push, {}).keys() == self.layers.keys()
                return on.PushChecked(shard=self._name, push=command.push, complete=whole)
            case do.Forget():
                self._forget(command.ticket)
                return None
            case do.Measure():
                self._check_held(command.pushes)
                self._measured[command.update] = command.pushes
                squares = {push: tuple(self._sums[push][k] for k in self.layers) for push in command.pushes}
                return on.NormsMeasured(shard=self._name, update=command.update, squares=squares)
            case do.Combine():
                return self._combine(command)
            case do.StageVersion():
                self._staged = None
                self._staged = (command.update, self._next(command))
                return on.Staged(shard=self._name, update=command.update)
            case do.Commit():
                return self._commit(command)
            case do.Restore():
                return self._restore(command)

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._ended.append(ticket)
            self._pushes.pop(ticket, None)
            self._sums.pop(ticket, None)
        self._means.pop(ticket, None)
        self._measured.pop(ticket, None)
        if self._staged and self._staged[0] == ticket:
            self._staged = None

    def _forget_pushes(self) -> None:
        for ticket in [*self._pushes, *self._means]:
            if self._staged is None or self._staged[0] != ticket:
                self._forget(ticket)

    def _check_held(self, pushes: Sequence[Ticket]) -> None:
        gone = [str(push) for push in pushes if self._sums.get(push, {}).keys() != self.layers.keys()]
        if gone:
            raise ProtocolError(f"{self._name}: push {', '.join(gone)} is not held whole; register again")

    def _combine(self, command: do.Combine) -> on.MeanCombined:
        for weight in command.weights if command.compensation else ():
            self._compensate(weight, command.compensation)
        mean: dict[str, Tensor] = {}
        squares = []
        for k, layer in self.layers.items():
            held = [(weight.part, self._pushes[weight.push][k]) for weight in command.weights]
            for one in layer.parameters:
                parts = [(part, tensors[one.name]) for part, tensors in held]
                first = parts[0][1]
                reusable = first.dtype == numerics.velocity_type(first.dtype) and first.is_contiguous()
                mean[one.name] = numerics.weighted_mean(parts, out=first if reusable else None)
            squares.append(numerics.sum_of_squares([mean[one.name] for one in layer.parameters]))
        self._means[command.update] = mean
        return on.MeanCombined(shard=self._name, update=command.update, squares=tuple(squares))

    def _compensate(self, weight: do.PushWeight, strength: float) -> None:
        """Correct a push for what came since the version that it began from, if that is known here."""
        serving = self.serving
        with self._lock:
            then = self._bases.get(weight.base_version)
        if serving is None or then is None or weight.base_version == serving.version:
            return
        for tensors in self._pushes[weight.push].values():
            for name, gradient in tensors.items():
                numerics.compensate(gradient, serving.parameters[name], then[name], strength=strength)

    def _next(self, command: do.StageVersion) -> ShardVersion:
        """Make a version: a push's tensors as they are, or a step along the mean."""
        if command.parameters:
            held = self._pushes[command.parameters]
            first = {name: tensor for k in self.layers for name, tensor in held[k].items()}
            still = {
                name: torch.zeros_like(one, dtype=numerics.velocity_type(one.dtype)) for name, one in first.items()
            }
            state: dict[str, numerics.Tensors] = dict.fromkeys(self._rule.slots, still)
            return ShardVersion(version=command.version, parameters=first, state=state)
        before, means = self.serving, self._means.pop(command.update)
        assert before is not None, "the master stages a step only where a version is served"
        parameters = {name: one for layer in self.layers.values() for name, one in self._room(layer).items()}
        kept: dict[str, dict[str, Tensor]] = {slot: {} for slot in self._rule.slots}
        for name, mean in means.items():
            old = [before.state[slot][name] for slot in kept]
            new = numerics.step_along(
                mean, before.parameters[name], old, self._rule, scale=command.scale, part=command.part,
                out=parameters[name],
            )  # fmt: skip
            for slot, one in zip(kept, new, strict=True):
                kept[slot][name] = one
        return ShardVersion(version=command.version, parameters=parameters, state=kept)

    def _room(self, layer: Layer) -> dict[str, Tensor]:
        """Return tensors for a layer, in memory that was used before if there is some."""
        places = LayerBytes(layer.parameters)
        return places.tensors(self._pool.take(places.buffer_bytes))

    def _commit(self, command: do.Commit) -> on.Committed:
        assert self._staged is not None, "the master commits only what is staged"
        _, staged = self._staged
        assert staged.version == command.version
        for ticket in (*self._measured.get(command.update, ()), command.update):
            self._forget(ticket)
        with self._lock:
            here = self._bases | {number: one.parameters for number, one in self._versions.items()}
            self._bases = {number: here[number] for number in command.bases if number in here}
        self._serve(staged, keep=command.keep)
        return on.Committed(shard=self._name, version=command.version, versions=self.restorable)

    def _restore(self, command: do.Restore) -> OuterEvent:
        source = self._find(command.source)
        if source is None:
            return self.registered()
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
        try:
            _check_tensors(specs, found.parameters, what)
            kept = [
                replace(one, dtype=dtype_name(numerics.velocity_type(found.parameters[one.name].dtype)))
                for one in specs
            ]
            for slot in self._rule.slots:
                _check_tensors(kept, found.state.get(slot, {}), f"{what}, {slot}")
        except ProtocolError as error:
            raise ConfigError(f"{error}; give it a folder of its own for snapshots, or an empty one") from error
        return found

    def _serve(self, version: ShardVersion, *, keep: Sequence[int] = ()) -> None:
        with self._lock:
            kept = {number: self._versions[number] for number in keep if number in self._versions}
            self._versions = {**kept, version.version: version}
            self._serving, self._staged = version.version, None


def _check_tensors(specs: Sequence[ParameterSpec], tensors: numerics.Tensors, what: str) -> None:
    try:
        told = unlike(specs_of(tensors), specs)
    except ValueError as error:
        told = str(error)
    if told:
        raise ProtocolError(f"{what}: {told}; the cluster's model must have the parameters that the shards hold")
