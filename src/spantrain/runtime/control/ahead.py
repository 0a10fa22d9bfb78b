"""What devices are to take of others' state ahead of a change of plan, while steps go on."""

from dataclasses import dataclass
from enum import StrEnum

from spantrain.transport.connection.peers import PeerAddress


@dataclass(frozen=True, slots=True)
class AheadCopy:
    """Units of the present plan that one device is to have of another, which holds its stage whole."""

    giver: str
    taker: str
    units: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AheadChange:
    """What is copied ahead from now on, in the place of all that was before; without copies: nothing more."""

    number: int
    """Of a leg's, by which its messages are told from those of one that was given up."""
    generation: int
    """Of the plan that runs."""
    copies: tuple[AheadCopy, ...] = ()
    """One at most for each two devices."""
    newcomers: tuple[PeerAddress, ...] = ()
    """Takers that have no part in the present plan (`runtime.control.orders.FollowOrder`)."""


class AheadState(StrEnum):
    """How far a giver is."""

    COPYING = "copying"
    LEVEL = "level"
    """All of the steps before this one is on its way: a change now is one of a moment."""
    FULL = "full"
    """More waits than what was to be copied: the way is too slow for it."""
