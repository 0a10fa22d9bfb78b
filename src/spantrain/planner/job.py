"""What a plan is made for."""

from dataclasses import dataclass

from spantrain.cost.memory import OPTIMIZER_STATE_RATIO
from spantrain.errors import PlanError
from spantrain.schedule.registry import splits_backward

_MOST_MICRO_BATCHES = 256


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What is to be trained: samples per step, optimizer, dtype, order of work, micro-batch sizes."""

    global_batch: int
    optimizer: str = "adamw"
    """`adamw`, `momentum` or `sgd`: how much state a parameter has."""
    dtype: str | None = None
    """None: the profile's own."""
    schedule: str = "critical-path"
    micro_batches: tuple[int, ...] = ()
    """Sizes to try; empty: powers of two, their triples that divide the global batch, and the global batch itself."""

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise PlanError(f"global_batch must be at least 1, got {self.global_batch}")
        if self.optimizer not in OPTIMIZER_STATE_RATIO:
            raise PlanError(f"optimizer must be one of {', '.join(OPTIMIZER_STATE_RATIO)}, got {self.optimizer!r}")
        wrong = [size for size in self.micro_batches if not 1 <= size <= self.global_batch]
        if wrong:
            raise PlanError(f"micro_batches must lie in 1 to the global batch, {self.global_batch}; got {wrong}")

    @property
    def splits_backward(self) -> bool:
        """Whether its schedule goes back in I and W."""
        return splits_backward(self.schedule)

    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Return the sizes to try, rising."""
        if self.micro_batches:
            return tuple(sorted(set(self.micro_batches)))
        total = self.global_batch
        powers = [2**k for k in range(total.bit_length())]
        triples = [3 * size for size in powers if total % (3 * size) == 0]
        sizes = {size for size in (*powers, *triples, total) if size <= total}
        return tuple(sorted(size for size in sizes if total <= size * _MOST_MICRO_BATCHES))
