"""What clusters and shards hold in a simulated run: by default names of the steps that were learned, and no numbers.

A driver asks for bodies, tells them what happens to them, and carries what they give to others without looking into it.
Those of `PlainBodies` know of each version which inner steps it has learned, and assert that none is in it twice. With
tensors, `outer.shard.shard.OuterShard` is a shard's body, and `outer.client.replica.ClusterCopy` does the work of a
cluster's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import OuterEvent, Ticket
from spantrain.core.outer.layers import ShardLayout
from spantrain.errors import ProtocolError
from spantrain.formats.registry import WireFormat


class ClusterBody(Protocol):
    """A cluster's model, and what it must remember of it."""

    def step(self) -> None:
        """Take an inner step."""

    def keep(self) -> None:
        """Remember what the model is now, to push it."""

    def layer(self, index: int, wire_format: WireFormat, /, *, parameters: bool) -> Any:
        """Return a layer to send: of what was kept last, or of what was learned since the round began up to there."""

    def skipped(self) -> None:
        """Note that the push came to nothing."""

    def pulled(self, layers: Mapping[int, Any], *, counted: bool, left_out: bool) -> None:
        """Begin a round from a version; whether the last push was part of an update, and was left out of it."""

    def part(self, number: int, count: int, /) -> "ClusterBody":
        """Return a fragment of it, of so many: all but steps are the parts' then."""


class ShardBody(Protocol):
    """A shard's memory; snapshots that it makes by itself outlive it."""

    @property
    def restorable(self) -> tuple[int, ...]:
        """Versions that it can go on from."""

    def registered(self) -> on.ShardRegistered:
        """Forget what belonged to an earlier connection; return what to register with."""

    def take(self, push: Ticket, layer: int, content: Any, wire_format: WireFormat, /) -> None:
        """Keep a layer of a push.

        Raises:
            ProtocolError: it is not wanted (any more).
        """

    def give(self, version: int, layer: int) -> Any:
        """Return a layer of a version.

        Raises:
            ProtocolError: it is not there.
        """

    def on_command(self, command: Any, /) -> OuterEvent | None:
        """Do what the master commands; return the answer."""

    def snapshot(self) -> None:
        """Keep what is served for another life."""


class Bodies(Protocol):
    """Makes them; a member that was killed is given a new one when it comes back."""

    def cluster(self, name: str) -> ClusterBody:
        """Return a cluster that was just started."""

    def shard(self, name: str, layout: ShardLayout, fragment: int, /) -> ShardBody:
        """Return what a shard that was just started has of a fragment, with the snapshots of its earlier lives."""


@dataclass(frozen=True, kw_only=True, order=True)
class StepSpan:
    """Inner steps of one life of a cluster."""

    cluster: str
    life: int
    first: int
    end: int


Learned = frozenset[StepSpan]


class PlainCluster:
    """Counts its steps."""

    def __init__(self, name: str, life: int) -> None:
        self._name, self._life = name, life
        self._start = self._kept = 0
        self._before: Learned = frozenset()
        self._parts: list[PlainCluster] = []
        self._taken = 0

    def part(self, number: int, count: int, /) -> "PlainCluster":  # noqa: ARG002
        """Return a fragment of it."""
        self._parts.append(PlainCluster(self._name, self._life))
        return self._parts[-1]

    def step(self) -> None:
        """Count it."""
        self._taken += 1
        for part in self._parts:
            part.step()

    def keep(self) -> None:
        """Remember how many steps there were."""
        self._kept = self._taken

    def layer(self, index: int, wire_format: WireFormat, /, *, parameters: bool) -> Learned:
        """Return the steps that were kept, and with parameters those of the version before; all layers are alike."""
        del index, wire_format
        own = StepSpan(cluster=self._name, life=self._life, first=self._start, end=self._kept)
        return (self._before if parameters else frozenset()) | ({own} if own.first < own.end else frozenset())

    def skipped(self) -> None:
        """Change nothing."""

    def pulled(self, layers: Mapping[int, Learned], *, counted: bool, left_out: bool) -> None:  # noqa: ARG002
        """Go on from a version.

        Raises:
            AssertionError: its layers are of two versions.
        """
        (version,) = {*layers.values()}
        self._before = version
        if counted:
            self._start = self._kept


class PlainShard:
    """Holds for each version what it has learned; commands are those of `outer.shard.shard.OuterShard`."""

    def __init__(self, name: str, layers: range, snapshots: dict[int, Learned]) -> None:
        self._name, self._layers, self.snapshots = name, layers, snapshots
        self.pushes: dict[Ticket, dict[int, Learned]] = {}
        self._of_update: dict[Ticket, tuple[Ticket, ...]] = {}
        self._means: dict[Ticket, Learned] = {}
        self._staged: tuple[int, Learned] | None = None
        self.versions: dict[int, Learned] = {}
        self.serving: int | None = None

    @property
    def restorable(self) -> tuple[int, ...]:
        """Versions served, staged or in a snapshot."""
        return tuple(sorted(self.can_restore()))

    def can_restore(self) -> dict[int, Learned]:
        """Return the versions served, staged or in a snapshot, with what each has learned."""
        return {**self.snapshots, **self.versions, **(dict([self._staged]) if self._staged else {})}

    def registered(self) -> on.ShardRegistered:
        """Forget pushes."""
        self.pushes, self._means = {}, {}
        return on.ShardRegistered(shard=self._name, versions=self.restorable)

    def take(self, push: Ticket, layer: int, content: Learned, wire_format: WireFormat, /) -> None:  # noqa: ARG002
        """Keep a layer of a push."""
        self.pushes.setdefault(push, {})[layer] = content

    def give(self, version: int, layer: int) -> Learned:
        """Return what a version has learned.

        Raises:
            ProtocolError: it is not held.
        """
        if version not in self.versions or layer not in self._layers:
            raise ProtocolError(f"{self._name}: has no layer {layer} of version {version}; ask for one that it serves")
        return self.versions[version]

    def snapshot(self) -> None:
        """Keep the version that is served, and the two before it."""
        if self.serving is not None:
            self.snapshots[self.serving] = self.versions[self.serving]
            for version in sorted(self.snapshots)[:-3]:
                del self.snapshots[version]

    def on_command(self, command: Any, /) -> OuterEvent | None:
        """Answer as a shard with numbers does."""
        match command:
            case do.CheckPush():
                whole = self.pushes.get(command.push, {}).keys() == set(self._layers)
                return on.PushChecked(shard=self._name, push=command.push, complete=whole)
            case do.Forget():
                self._forget(command.ticket)
            case do.Measure():
                self._of_update[command.update] = command.pushes
                squares = {push: self._squares(push) for push in command.pushes}
                return on.NormsMeasured(shard=self._name, update=command.update, squares=squares)
            case do.Combine():
                self._means[command.update] = self._joined([self._whole(weight.push) for weight in command.weights])
                return on.MeanCombined(shard=self._name, update=command.update, squares=(1.0,) * len(self._layers))
            case do.StageVersion():
                self._staged = (command.version, self._next(command))
                return on.Staged(shard=self._name, update=command.update)
            case do.Commit() | do.Restore():
                return self._serve(command)
        return None

    def _forget(self, ticket: Ticket) -> None:
        self.pushes.pop(ticket, None)
        self._of_update.pop(ticket, None)
        if self._means.pop(ticket, None) is not None:
            self._staged = None

    def _whole(self, push: Ticket) -> Learned:
        held = self.pushes[push]
        assert held.keys() == set(self._layers), "an update has whole pushes only"
        (content,) = {*held.values()}
        return content

    def _squares(self, push: Ticket) -> tuple[float, ...]:  # noqa: ARG002
        """Return a sum of squares for each layer of a push."""
        return (1.0,) * len(self._layers)

    def _joined(self, parts: Sequence[Learned]) -> Learned:
        """Return all that several have learned.

        Raises:
            AssertionError: two have learned the same, which would count twice.
        """
        found: dict[tuple[str, int, int], StepSpan] = {}
        for span in (span for part in parts for span in part):
            key = (span.cluster, span.life, span.first)
            assert key not in found, f"{span} would count twice"
            found[key] = span
        return frozenset(found.values())

    def _next(self, command: do.StageVersion) -> Learned:
        if command.parameters:
            return self._whole(command.parameters)
        assert self.serving is not None
        return self._joined([self.versions[self.serving], self._means[command.update]])

    def _serve(self, command: do.Commit | do.Restore) -> OuterEvent:
        if isinstance(command, do.Commit):
            assert self._staged
            assert self._staged[0] == command.version
            kept = {version: self.versions[version] for version in command.keep if version in self.versions}
            self.versions = {**kept, command.version: self._staged[1]}
            for push in (*self._of_update.get(command.update, ()), command.update):
                self._forget(push)
        elif command.source not in self.can_restore():
            return self.registered()
        else:
            self.versions = {command.version: self.can_restore()[command.source]}
            self.pushes, self._means = {}, {}
        self.serving, self._staged = command.version, None
        sort = on.Committed if isinstance(command, do.Commit) else on.Restored
        return sort(shard=self._name, version=command.version, versions=self.restorable)


class PlainBodies:
    """Makes bodies without numbers."""

    def __init__(self) -> None:
        self._lives: dict[str, int] = {}
        self._snapshots: dict[tuple[str, int], dict[int, Learned]] = {}

    def cluster(self, name: str) -> PlainCluster:
        """Return a cluster that has learned nothing."""
        self._lives[name] = self._lives.get(name, -1) + 1
        return PlainCluster(name, self._lives[name])

    def shard(self, name: str, layout: ShardLayout, fragment: int, /) -> PlainShard:
        """Return a shard with what its earlier lives have left."""
        return PlainShard(name, layout.layers_of(name), self._snapshots.setdefault((name, fragment), {}))
