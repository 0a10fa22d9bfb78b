"""Which shards are ready, and from which version they all go on after one was lost."""

from collections.abc import Iterable, Mapping

from spantrain.core.outer.commands import OuterCommand, Restore


class ShardTable:
    """The shards of a layout: away, joined, restoring, or ready.

    A shard that joins tells the versions that it can restore. When all have joined, those that are not ready go to the
    present version, if all of them have it. If not, all go back to the newest version that all have, under a new
    number: so a number never stands for two contents, on whichever shards. What a shard holds is not known from when it
    is told to commit or to restore until it answers; nothing is restored meanwhile.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._versions: dict[str, frozenset[int]] = {}
        self._ready: set[str] = set()
        self._unsure: dict[str, float] = {}
        """Those that were told to commit or to restore and have not answered, and when."""
        self._restoring: int | None = None

    @property
    def all_ready(self) -> bool:
        """Whether all serve the present version."""
        return len(self._ready) == len(self._names)

    @property
    def away(self) -> tuple[str, ...]:
        """Those that have not joined."""
        return tuple(name for name in self._names if name not in self._versions)

    @property
    def present(self) -> tuple[str, ...]:
        """Those that have joined."""
        return tuple(name for name in self._names if name in self._versions)

    @property
    def versions(self) -> Mapping[str, frozenset[int]]:
        """What those that have joined can restore, as far as is known."""
        return dict(self._versions)

    @property
    def ready(self) -> frozenset[str]:
        """Those that serve the present version."""
        return frozenset(self._ready)

    @property
    def waits_since_s(self) -> float | None:
        """When the first of those was told that have not answered."""
        return min(self._unsure.values(), default=None)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def is_present(self, name: str) -> bool:
        """Whether a shard has joined."""
        return name in self._versions

    def joined(self, name: str, versions: Iterable[int]) -> None:
        """Note that a shard has come."""
        self._ready.discard(name)
        self._versions[name] = frozenset(versions)

    def holds(self, name: str, versions: Iterable[int]) -> None:
        """Note what a shard can restore, by a sign of life."""
        if name in self._versions and name not in self._unsure:
            self._versions[name] = frozenset(versions)

    def told(self, now_s: float) -> None:
        """Note that all shards were told to commit."""
        self._unsure |= dict.fromkeys(self._versions, now_s)

    def answered(self, name: str, versions: Iterable[int]) -> None:
        """Note what a shard can restore, by its answer to what it was told."""
        self._unsure.pop(name, None)
        self.holds(name, versions)

    def lost(self, name: str) -> None:
        """Note that a shard is away; a restoring that was under way begins again when it is back."""
        self._versions.pop(name, None)
        self._unsure.pop(name, None)
        self._ready.discard(name)
        self._restoring = None

    @property
    def to_restore(self) -> bool:
        """Whether all have joined, some are not ready, and nobody told them how to become so."""
        return not self.away and not self.all_ready and not self._unsure and self._restoring is None

    def common(self) -> frozenset[int]:
        """Return the versions that all can restore."""
        return frozenset.intersection(*self._versions.values())

    def no_parameters(self) -> None:
        """Note that there is nothing to restore: all are ready for first parameters."""
        self._ready = set(self._names)

    def restore(self, now_s: float, source: int, version: int) -> list[OuterCommand]:
        """Command shards to go to a version; those that serve it already are left alone."""
        if source != version:
            self._ready.clear()
        self._restoring = version
        self._unsure |= dict.fromkeys(set(self._names) - self._ready, now_s)
        reason = f"all shards have version {source}" + ("" if source == version else f", which is now {version}")
        return [
            Restore(shard=name, source=source, version=version, reason=reason)
            for name in self._names
            if name not in self._ready
        ]

    def late(self, now_s: float, limit_s: float) -> tuple[str, ...]:
        """Return those that were told something so long ago, and have not answered."""
        return tuple(name for name, told_s in sorted(self._unsure.items()) if now_s - told_s >= limit_s)

    def restored(self, name: str, version: int) -> bool:
        """Note that a shard has restored; return whether it was told to."""
        if version != self._restoring or name in self._ready or name not in self._versions:
            return False
        self._ready.add(name)
        if self.all_ready:
            self._restoring = None
        return True
