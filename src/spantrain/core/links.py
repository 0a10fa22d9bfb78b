"""What a device knows of the links to its peers while it trains, by its own clock alone."""

import math
from dataclasses import dataclass
from enum import StrEnum


class LinkVerdict(StrEnum):
    """What holds a link up, if anything does."""

    CALM = "calm"
    """It carries what is expected of it."""
    SLOW_LINK = "slow-link"
    """What is on the wire takes longer than it should."""
    SLOW_PEER = "slow-peer"
    """The peer leaves no room: messages wait though nothing of ours is on the wire."""
    IDLE = "idle"
    """Nothing large enough to tell anything was sent of late."""


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """One direction of one link, as its sender sees it."""

    peer: str
    verdict: LinkVerdict
    bytes_per_s: float | None
    """Achieved while the link was busy; None where no message was large enough to tell."""
    latency_s: float | None
    """Shortest time from a small message's start to the peer's word that it has it: there and back; None: not known."""
    queued_s: float
    """The longest that a message of late waited before its first byte left."""
    busy_s: float
    """For how long the link was busy with these messages."""
    messages: int
    """That the rate was found from."""
    confidence: float
    """0 to 1: how far the messages agree on the rate, and whether they are enough."""
    newest_bytes_per_s: float | None = None
    """The rate of the newest quarter of them; None where there are too few."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "newest_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"link to {self.peer}: {name} must be positive or None, got {rate}")
        for name in ("latency_s", "queued_s", "busy_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ValueError(f"link to {self.peer}: {name} must be finite and not negative, got {seconds}")
        if self.messages < 0 or not 0 <= self.confidence <= 1:
            raise ValueError(
                f"link to {self.peer}: messages must not be negative and confidence must be 0 to 1, got "
                f"{self.messages} and {self.confidence}"
            )
