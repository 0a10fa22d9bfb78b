"""Gradient sums in buckets beside the last backward action of a step: which are ready when, and what is left behind it.

A backward pass goes through a stage's units from the last to the first, so their gradients are whole in that order, and
buckets are filled in it (`runtime.gradients.step_sums`). Buckets are summed one by one. With more and smaller
ones the first sum begins earlier, and each one costs the ring's latency once more.

The ways in which frameworks sum gradients, with the settings of each that are tried, and what carries them:

spantrain           ours (`runtime.gradients.step_sums`): beside the last backward, buckets by the link, two at once.
torch-ddp           `DistributedDataParallel`: buckets of 25 MiB, the first of 1 MiB, each summed as soon as it is whole
                    (Li et al., "PyTorch Distributed", VLDB 2020, sections 3.2 and 4.2; `_DEFAULT_BUCKET_CAP_MB`,
                    `dist._DEFAULT_FIRST_BUCKET_BYTES`), or all of the size that is given as `bucket_cap_mb`. Gloo has
                    two threads for them (`ProcessGroupGloo::Options`).
torch-fsdp          each unit's gradients summed to their holders behind its backward, beside the next unit's (Zhao et
                    al., "PyTorch FSDP", VLDB 2023, sections 3.2 and 4.3).
deepspeed-zero      buckets of `reduce_bucket_size`, 500 million numbers unless it is given, beside the backward
                    (`overlap_comm`), summed to their holders (DeepSpeed's `zero/config.py`, `stage_1_and_2.py`).
deepspeed-pipeline  all behind the last backward, in buckets of 500 million numbers (`_exec_reduce_grads` of its
                    `PipelineEngine`, `MEMORY_OPT_ALLREDUCE_SIZE`); so Megatron-DeepSpeed.
alpa                one sum behind the accumulation of all micro-batches (`AutoShardingOption.all_reduce_threshold` is
                    2^60); so Metis, which is built on it.

What a framework's user can choose is tuned: `sum_options` are the settings among which the best is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, takewhile

from spantrain.core.cluster import Device
from spantrain.core.plan import DEFAULT_BUCKET_BYTES, OWN_SUMS, GradientSums, SumModel
from spantrain.cost.collectives import Collectives, SumOptions
from spantrain.devices.registry import find_backend


@dataclass(frozen=True, kw_only=True)
class SumBucket:
    """Gradients that are summed at once."""

    size_bytes: float
    last_unit: int
    """Position in the stage of the unit whose gradients come last: with it the bucket is whole."""


def fill_buckets(unit_bytes: Sequence[float], sums: GradientSums) -> tuple[SumBucket, ...]:
    """Fill buckets with the gradients of a stage's units, from the last one on.

    >>> [(bucket.size_bytes, bucket.last_unit) for bucket in fill_buckets((2, 5, 0, 3), GradientSums(bucket_bytes=4))]
    [(4.0, 1), (4.0, 1), (2.0, 0)]
    """
    ends = list(accumulate(reversed(unit_bytes)))
    total = ends[-1] if ends else 0
    found: list[SumBucket] = []
    unit, begin = 0, 0.0
    while begin < total:
        end = min(sums.bucket_end(begin), total)
        while ends[unit] < end:
            unit += 1
        found.append(SumBucket(size_bytes=end - begin, last_unit=len(ends) - 1 - unit))
        begin = end
    return tuple(found)


def behind_s(seconds: Sequence[float], parts: Sequence[float], action_s: float) -> float:
    """Return the seconds of a sum that are left when the last backward action ends.

    Args:
        seconds: of each bucket.
        parts: of the action, after which each is whole.
        action_s: seconds of the action.

    >>> behind_s((1.0, 1.0, 1.0), (0.25, 0.5, 1.0), 4.0)
    1.0
    >>> behind_s((3.0, 3.0), (0.5, 1.0), 4.0)
    4.0
    """
    left_s = most_s = 0.0
    for bucket_s, part in zip(reversed(seconds), reversed(parts), strict=True):
        left_s += bucket_s
        most_s = max(most_s, left_s - (1.0 - part) * action_s)
    return most_s


_MIB = 2**20
_DDP_CAPS_MIB = (5, 10, 25, 50, 100, 200, 400)
_DEEPSPEED_BYTES = 4 * 500_000_000
_PARTS = 16
"""Buckets in which a stage's gradients are tried at least, but for those of the default size."""


def nccl_between(devices: Sequence[Device]) -> bool:
    """Return whether NCCL carries what devices sum, which then are all different; Gloo carries all else."""
    return carrier_between(devices) != "gloo"


def carrier_between(devices: Sequence[Device]) -> str:
    """Return what `torch.distributed` calls its carrier of what devices sum, by the types of device that it takes."""
    rows = {find_backend(device.backend) for device in devices}
    row = next(iter(rows), None)
    cards = {(device.host, device.backend) for device in devices}
    if len(rows) > 1 or row is None or row.carrier == "gloo" or len(cards) < len(devices):
        return "gloo"
    return f"cpu:gloo,{row.torch_type}:{row.carrier}"


def default_sums(model: SumModel) -> GradientSums:
    """Return the settings of a framework that nobody has tuned."""
    return sum_options(model, 0.0)[0]


def sum_options(model: SumModel, total_bytes: float) -> tuple[GradientSums, ...]:
    """Return the settings of a framework that are tried for so many bytes of gradients, its default first."""
    match model:
        case SumModel.SPANTRAIN:
            return _own_options(total_bytes)
        case SumModel.TORCH_DDP:
            usual = GradientSums(model=model, bucket_bytes=25 * _MIB, first_bucket_bytes=_MIB)
            return (usual, *(GradientSums(model=model, bucket_bytes=cap * _MIB) for cap in _DDP_CAPS_MIB))
        case SumModel.TORCH_FSDP:
            return (GradientSums(model=model, at_once=1),)
        case SumModel.DEEPSPEED_ZERO:
            sizes = (_DEEPSPEED_BYTES // parts for parts in (1, 4, 16, 64))
            return tuple(GradientSums(model=model, bucket_bytes=size, at_once=1) for size in sizes)
        case SumModel.DEEPSPEED_PIPELINE:
            return (GradientSums(model=model, bucket_bytes=_DEEPSPEED_BYTES, beside_backward=False, at_once=1),)
        case SumModel.ALPA:
            return (GradientSums(model=model, bucket_bytes=2**60, beside_backward=False, at_once=1),)


def _own_options(total_bytes: float) -> tuple[GradientSums, ...]:
    """Return the default, equal parts down to a sixteenth or the default size, and all that torch's DDP has.

    >>> [sums.bucket_bytes / DEFAULT_BUCKET_BYTES for sums in _own_options(2.5 * DEFAULT_BUCKET_BYTES)]
    [1.0, 2.5, 1.25, 0.625, 0.3125, 0.15625, 3.125]
    """
    least = max(1.0, min(float(DEFAULT_BUCKET_BYTES), total_bytes / _PARTS))
    parts = takewhile(lambda size: size >= least, (total_bytes / 2**power for power in count()))
    found = [OWN_SUMS, *(GradientSums(bucket_bytes=math.ceil(size)) for size in parts)]
    torch = (replace(sums, model=SumModel.SPANTRAIN) for sums in sum_options(SumModel.TORCH_DDP, total_bytes))
    found += [sums for sums in torch if sums.bucket_end(0) < total_bytes]
    return tuple(dict.fromkeys(found))


def own_sum_s(collectives: Collectives, devices: Sequence[Device], size_bytes: float) -> float:
    """Return the seconds of our own sum of so many bytes over a ring, in the best of two buckets and of one.

    Raises:
        ProfileError: a pair of neighbours was not measured.
    """
    names, waits = [device.name for device in devices], not nccl_between(devices)
    ways = ((size_bytes, 1), (size_bytes / 2, 2)) if waits else ((size_bytes, 1),)
    return min(
        collectives.seconds(names, size, options=SumOptions(waits_for_receiver=waits, at_once=at_once))
        for size, at_once in ways
    )
