"""A master of a model in fragments: a master for each, over lines that they share; who is there is the same for all.

Streaming DiLoCo (Douillard et al., 2025) exchanges a model in fragments at different steps, each every H steps, so that
a line carries one fragment at a time. Kept: that, and what happens to a fragment between two exchanges. Decided here:

- To its master a fragment is a model of its own: its pushes, windows, norms, versions and restores are as of a whole.
  So nothing is ever mixed within a fragment, and a version of the whole is a number for each.
- What is told of a member (it lives, it left, a shard is lost) is told to all masters. What is of a fragment comes with
  its number. Data is leased by the first fragment's master alone: a sample counts with the first fragment's push.
- One cluster brings the first parameters of all fragments, so that they are of one model; another brings what is
  missing only when that one is gone, or what it brought was of no use (not finite), or was lost again on all shards.
- A ticket's number, divided by the count of fragments, leaves its fragment: no two fragments share one.
- The limit of a mean's norm is of the whole: of a fragment it is that times the root of its part of the bytes.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent, of_fragment
from spantrain.core.outer.layers import ShardLayout, fragment_layouts
from spantrain.errors import ProtocolError
from spantrain.outer.policy.chunks import ChunkState
from spantrain.outer.policy.exchanges import SharedLines
from spantrain.outer.policy.master import OuterMaster
from spantrain.outer.policy.settings import MasterState, OuterSettings


@dataclass(frozen=True, kw_only=True)
class FragmentedState:
    """What outlives a master; can be written as JSON."""

    fragments: tuple[MasterState, ...]
    """Of each fragment; the first has the data that is leased."""

    def __post_init__(self) -> None:
        if not self.fragments or any(one.chunks for one in self.fragments[1:]):
            raise ValueError(f"a state needs a fragment, and only the first leases data; got {len(self.fragments)}")

    @classmethod
    def of(cls, fragments: int, chunks: ChunkState | None = None) -> "FragmentedState":
        """Return the state of a master that begins."""
        return cls(fragments=(MasterState(chunks=chunks), *[MasterState()] * (fragments - 1)))

    def with_passes(self, passes: int | None) -> "FragmentedState":
        """Return the same with so many passes over the data, if there is any.

        Raises:
            ValueError: more have begun.
        """
        chunks = self.leading.chunks
        if chunks is None:
            return self
        leading = replace(self.leading, chunks=chunks.with_passes(passes))
        return FragmentedState(fragments=(leading, *self.fragments[1:]))

    @property
    def leading(self) -> MasterState:
        """Of the first fragment; what its pushes told of tokens and data counts, since all tell the same."""
        return self.fragments[0]

    @property
    def seeded(self) -> bool:
        """Whether the shards have parameters of all fragments."""
        return all(one.seeded for one in self.fragments)


class FragmentedMaster:
    """Hears events with their time and fragment; answers with commands, to be carried out in order."""

    def __init__(
        self, layout: ShardLayout, settings: OuterSettings | None = None, state: FragmentedState | None = None,
        *, now_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Begin, or go on from a saved state: clusters and shards register again, pushes under way are gone.

        Raises:
            ValueError: a shard has too few layers for so many fragments, or the state is of another number of them.
        """
        settings = settings or OuterSettings()
        count = settings.fragments
        before = (state or FragmentedState.of(count)).fragments
        if len(before) != count:
            raise ValueError(f"the state is of {len(before)} fragments, the settings are of {count}; give it its own")
        lines = self.lines = SharedLines(layout.shards, settings)
        self.layout = layout
        self.parts = tuple(
            OuterMaster(
                part, _settings_of(settings, part, layout), kept, now_s=now_s, lines=lines, fragment=(number, count)
            )
            for number, (part, kept) in enumerate(zip(fragment_layouts(layout, count), before, strict=True))
        )
        """A master for each fragment, to look at."""
        self._brings: str | None = None
        """The cluster that brings the first parameters of several fragments."""

    @property
    def state(self) -> FragmentedState:
        """What to keep when told to save."""
        return FragmentedState(fragments=tuple(part.state for part in self.parts))

    @property
    def clusters(self) -> tuple[str, ...]:
        """Those that are registered, with all fragments."""
        return tuple(name for name in self.parts[0].clusters if all(name in part.members for part in self.parts))

    @property
    def waiting(self) -> frozenset[str]:
        """Clusters with an accepted push of some fragment of which nothing is decided yet."""
        return frozenset(name for part in self.parts for name in part.waiting)

    @property
    def dropped(self) -> Counter[str]:
        """Events of what has ended, by sort."""
        return sum((part.dropped for part in self.parts), Counter())

    @property
    def wake_s(self) -> float | None:
        """When time itself will change something: send `Ticked` then."""
        return min((part.wake_s for part in self.parts if part.wake_s is not None), default=None)

    def layer_of(self, transfer: on.LayerTransfer) -> int:
        """Return a layer's number in the whole model."""
        return transfer.layer * len(self.parts) + transfer.ticket.number % len(self.parts)

    def on_event(self, now_s: float, event: OuterEvent) -> tuple[OuterCommand, ...]:
        """Take in an event; return what is to be done, in this order.

        Raises:
            ProtocolError: the event is not possible; nothing has changed.
        """
        number, count = event.fragment, len(self.parts)
        if number >= count:
            raise ProtocolError(f"{type(event).__name__} is of fragment {number}, but there are {count}: join again")
        match event:
            case on.ClusterBeat() | on.ClusterLeft() | on.ShardLost() | on.Ticked():
                numbers = range(count)
            case on.Moved() | on.TransferLost():
                numbers = range(event.transfer.ticket.number % count, count, count)
            case on.PushAsked() if refused := self._brought_by_another(event):
                return (refused,)
            case _:
                numbers = range(number, number + 1)
        commands = [(k, command) for k in numbers for command in self.parts[k].on_event(now_s, event)]
        for k, command in commands:
            self._note_who_brings(self.parts[k], command)
        return tuple(dict.fromkeys(self._tagged(k, command) for k, command in commands))

    def _tagged(self, number: int, command: OuterCommand) -> OuterCommand:
        """Return a command with its fragment; who is to register does so with all, and all is saved at once."""
        match command:
            case do.Move():
                return of_fragment(command.transfer.ticket.number % len(self.parts), command)
            case do.RegisterAgain() | do.Save():
                return command
        return of_fragment(number, command)

    def _note_who_brings(self, part: OuterMaster, command: OuterCommand) -> None:
        """Note who brings first parameters; no more, if they came to nothing though all shards were there."""
        match command:
            case do.StartPush(parameters=True) if len(self.parts) > 1:
                self._brings = command.cluster
            case do.SkipRound() if command.cluster == self._brings and part.shards.all_ready:
                self._brings = None

    def _brought_by_another(self, event: on.PushAsked) -> OuterCommand | None:
        """Return a refusal, where another cluster brings the first parameters of all fragments.

        A fragment of which all versions were lost anybody may bring: who brought the first may have no more to give.
        """
        part, other = self.parts[event.fragment], self._brings
        if part.state.version or other in (None, event.cluster) or other not in part.clusters:
            return None
        reason = f"{other} brings the first parameters"
        return do.RefusePush(fragment=event.fragment, cluster=event.cluster, push=None, reason=reason)


def _settings_of(settings: OuterSettings, part: ShardLayout, whole: ShardLayout) -> OuterSettings:
    if settings.clip_norm is None:
        return settings
    return replace(settings, clip_norm=settings.clip_norm * math.sqrt(part.size_bytes / whole.size_bytes))
