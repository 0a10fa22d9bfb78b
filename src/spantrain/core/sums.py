"""How the replicas of a stage sum their gradients: whose way it is, in which buckets, beside the backward or not."""

from dataclasses import dataclass
from enum import StrEnum

DEFAULT_BUCKET_BYTES = 8 * 2**20
"""Of our own sums, until a size is chosen by the link (`planner.assembly.sum_buckets`)."""

_MAX_AT_ONCE = 64


class SumModel(StrEnum):
    """Whose way to sum gradients a stage follows; `cost.sum_models` has their settings and sources."""

    SPANTRAIN = "spantrain"
    TORCH_DDP = "torch-ddp"
    TORCH_FSDP = "torch-fsdp"
    DEEPSPEED_ZERO = "deepspeed-zero"
    DEEPSPEED_PIPELINE = "deepspeed-pipeline"
    ALPA = "alpa"


@dataclass(frozen=True, kw_only=True)
class GradientSums:
    """How a stage's gradients are summed over its replicas, which runtime and simulator both follow."""

    model: SumModel = SumModel.SPANTRAIN
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Size of the buckets, which are filled from the last unit on. Where parameters are divided, too (zero3), each
    unit's gradients are a bucket, whatever stands here."""
    first_bucket_bytes: int | None = None
    """Size of the bucket that is whole first; None: like the others."""
    beside_backward: bool = True
    """Whether a bucket is summed as soon as it is whole, beside the last backward; else all come behind it."""
    at_once: int = 2
    """Most buckets under way at once where Gloo carries them: two, as torch's has threads for. NCCL sums one by one."""

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "first_bucket_bytes", "at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.at_once > _MAX_AT_ONCE:
            raise ValueError(f"at_once must be at most {_MAX_AT_ONCE}, got {self.at_once}")

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that our runtime sends, at most; a bucket of one gradient is sent without."""
        return self.at_once * self.bucket_bytes

    def bucket_of(self, begin_bytes: float) -> int:
        """Return the number of the bucket that a gradient lies in, by the bytes that are summed before it.

        >>> [GradientSums(bucket_bytes=4, first_bucket_bytes=1).bucket_of(begin) for begin in (0, 1, 4, 5)]
        [0, 1, 1, 2]
        """
        first = self.bucket_bytes if self.first_bucket_bytes is None else self.first_bucket_bytes
        return 0 if begin_bytes < first else 1 + int((begin_bytes - first) // self.bucket_bytes)

    def bucket_end(self, begin_bytes: float) -> float:
        """Return the bytes that are summed with the bucket that begins there, and before it."""
        if begin_bytes == 0 and self.first_bucket_bytes is not None:
            return self.first_bucket_bytes
        return begin_bytes + self.bucket_bytes


OWN_SUMS = GradientSums()
"""Ours, as long as nothing is chosen."""
