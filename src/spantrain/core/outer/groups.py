"""Plans of single groups joined by an outer optimizer: who trains by itself, and how often parameters are exchanged."""

from typing import Annotated

from spantrain.core.records import Bounds, Record, check_bounds


class OuterGroup(Record):
    """Devices that train by themselves between two outer steps."""

    name: str
    """That of the first-level group: of its sites, with a number where a site is several groups."""
    devices: tuple[str, ...]
    global_batch: int
    """Samples of one of its inner steps."""
    step_s: float
    """Seconds of one inner step."""
    stages: str
    """Its plan in short, e.g. `units 0-5 on a1+a2 | 6-11 on a3`."""

    def __post_init__(self) -> None:
        if not self.devices or self.global_batch < 1 or self.step_s <= 0:
            raise ValueError(f"outer group {self.name}: needs devices, samples and seconds, got {self}")


class OuterPlan(Record):
    """A round: inner steps in all groups at once, then all exchange their parameters through a server."""

    groups: tuple[OuterGroup, ...]
    inner_steps: Annotated[int, Bounds(low=1)]
    """Of each group in a round."""
    exchange_s: float
    """Seconds in which all send their pseudo-gradients and get new parameters."""
    server: str
    """The device that takes the outer step."""
    samples_per_s: float
    """Over whole rounds. How much each sample teaches is another matter, which is not reckoned."""
    allowed: bool = False
    """Whether it may be chosen: it does not compute what one device would."""
    reason: str = ""
    """Why it may not be chosen, or what it breaks; empty if it may."""

    def __post_init__(self) -> None:
        if len(self.groups) < 2:
            raise ValueError(f"an outer optimizer joins two groups at least, got {len(self.groups)}")
        check_bounds(self)

    @property
    def global_batch(self) -> int:
        """Samples of one inner step of all groups together."""
        return sum(group.global_batch for group in self.groups)

    @property
    def round_s(self) -> float:
        """Seconds from one outer step to the next: the slowest group's inner steps, then the exchange."""
        return self.inner_steps * max(group.step_s for group in self.groups) + self.exchange_s
