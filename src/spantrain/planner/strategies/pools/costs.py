"""What the search over pools asks of a source of costs: a profile of ours, or a folder of measured figures."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spantrain.planner.strategies.pools.members import Member, Pool, PoolPlan, PoolStage

Array = NDArray[np.float64]


class Hop(NamedTuple):
    """What the messages of one micro-batch between two neighbours take, by the cut they cross: entry j, the cut in
    front of unit j. Forward goes from the lower stage to the upper one, backward the other way.
    """

    lower_forward_s: Array
    """For which the sender of an activation is kept from its next action."""
    upper_forward_s: Array
    """For which its receiver is."""
    upper_backward_s: Array
    lower_backward_s: Array
    delay_forward_s: Array
    """From the end of the sending action until the receiver may begin, when no device is kept."""
    delay_backward_s: Array
    link_s: Array
    """For which the busier direction of the link is taken."""


class PoolCosts(Protocol):
    """Seconds, bytes and money, for one model and one global batch."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Who is there."""

    @property
    def units(self) -> int:
        """How many there are."""

    @property
    def global_batch(self) -> int:
        """Samples in a step."""

    def sizes(self) -> tuple[int, ...]:
        """Return the micro-batch sizes of one replica that may be tried, rising."""

    def degrees(self, pool: int, size: int) -> tuple[int, ...]:
        """Return the tensor-parallel degrees for which a micro-batch's seconds are known."""

    def fits_a_host(self, pool: int, devices: int) -> bool:
        """Whether a pipeline may have so many devices of a pool: not more than a host, where it must stay inside."""

    def forward_s(self, member: Member, size: int) -> Array:
        """Return running sums over units; entry j is the seconds of units 0 to j-1."""

    def backward_s(self, member: Member, size: int) -> Array:
        """Return running sums over units of the full backward."""

    def need_bytes(self, member: Member, size: int, left: int, micro_batches: int) -> Array:
        """Return the bytes of units i to j-1 as [i, j]; `left`: the stages from this one to the last."""

    def memory_bytes(self, pool: int) -> int:
        """Return what a device has."""

    @property
    def inside_hosts(self) -> bool:
        """Whether the devices of a pool that a pipeline has must be in one host."""

    @property
    def width_matters(self) -> bool:
        """Whether what messages take depends on how many pipelines there are, since they share links."""

    def hop(self, lower: Member, upper: Member, size: int, width: int) -> Hop:
        """Return what messages between replicas on different hosts take when so many pipelines send at once."""

    def site_distance_s(self, a: int, b: int) -> float:
        """Return the seconds of a message of a mebibyte from one host of a pool to one of another, or to the next."""

    def gradient_sums_s(self, plan: PoolPlan) -> list[float]:
        """Return by stage the seconds of the sum of its gradients over its replicas."""

    def update_s(self, stage: PoolStage, size: int) -> float:
        """Return the seconds of the slowest member's update."""

    def sums_s(self, member: Member, width: int) -> Array:
        """Return about what summing gradients over so many replicas of one pool takes, as running sums over units."""

    def usd_per_s(self, pool: int) -> float:
        """Return what a device costs."""

    def usd_of_traffic(self, stages: tuple[PoolStage, ...], size: int, micro_batches: int) -> float:
        """Return what a step's traffic between sites costs."""
