"""What a master is told when it starts."""

import re
from dataclasses import dataclass, field

from spantrain.outer.policy.chunks import ChunkState
from spantrain.outer.policy.fragments import FragmentedState
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule

_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


@dataclass(frozen=True, kw_only=True)
class MasterConfig:
    """All but where it listens and where its state is."""

    shards: tuple[str, ...]
    """Names, in the order of the layers that they are to hold."""
    settings: OuterSettings = field(default_factory=OuterSettings)
    rule: OuterRule = field(default_factory=Nesterov)
    samples: int = 0
    """Of the data set that is leased in chunks; 0 where the clusters bring their own."""
    chunks: int = 0
    passes: int | None = None
    """Over the data; None for no end."""
    encrypted: bool = True
    """Of the data plane, with CURVE; the control plane always is, with TLS."""
    max_members: int = 128
    """Shards, clusters and further workers of clusters, all together."""

    def __post_init__(self) -> None:
        bad = [name for name in self.shards if _SHARD_NAME.fullmatch(name) is None]
        if bad or not self.shards or len(set(self.shards)) < len(self.shards):
            raise ValueError(
                "shards must be one name or more, each once, of 1 to 32 letters, digits or . _ - and beginning with a "
                f"letter or digit; got {', '.join(map(repr, self.shards)) or 'none'}"
            )
        if bool(self.samples) != bool(self.chunks):
            raise ValueError(
                f"samples and chunks go together, both positive or both 0; got {self.samples} and {self.chunks}"
            )
        if self.max_members <= len(self.shards):
            raise ValueError(
                f"max_members must leave room for clusters beside {len(self.shards)} shards, got {self.max_members}"
            )
        self.first_state()

    def first_state(self) -> FragmentedState:
        """Return the state of a master that begins.

        Raises:
            ValueError: the data cannot be cut so.
        """
        chunks = ChunkState(samples=self.samples, chunks=self.chunks, passes=self.passes) if self.samples else None
        return FragmentedState.of(self.settings.fragments, chunks)
