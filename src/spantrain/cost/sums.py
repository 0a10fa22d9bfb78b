"""Seconds of sums over devices, and the buckets in which frameworks sum gradients.

Signs: k devices, n bytes, for a pair of neighbours its latency and b(x), the seconds that x bytes keep it busy.

- Ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): each device
  sends n/k bytes to its neighbour in each of 2 (k-1) turns, first summing, then handing round. With equal neighbours
  2 (k-1) (latency + b(n/k)); SpanTrain's equation 5 is this without latency, with the slowest neighbours for all.
- Tree (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005): sums go
  up a binomial tree in ceil(log2 k) turns of n bytes, the result comes down in as many: 2 ceil(log2 k) (latency +
  b(n)). Fewer turns, more bytes: it pays for small sums over slow latencies.
- Hierarchical: a ring inside each host, then one of the hosts' first devices inside each site, then one between the
  sites' first devices, each of all n bytes (the two halves of a ring, summing and handing round, lie before and behind
  what is done between). Only the last ring crosses sites.

Rings wait for the word of their receivers, that they are ready (`Words`). In those of Gloo, as its source has it
(`gloo/allreduce.cc`), a device's n/k bytes go in at least two segments, of 1 MiB at most; two are under way at once,
and each waits for its receiver's word, which comes when the last but one before it is there. So a link of much latency
is never full, however large the sum, unless several sums run at once (`at_once`; torch's Gloo runs two). Between sites
ours go round rings that ask for all turns at once, so the first word is waited for (`runtime.gradients.rings`). NCCL's
receivers have room ahead of time. `benchmarks/gradient_sums.py` compares the two with live sums.

Gradients are summed in buckets, beside the last backward action of a step. A backward pass goes through a stage's
units from the last to the first, so their gradients are whole in that order, and buckets are filled in it
(`runtime.gradients.step_sums`). Buckets are summed one by one. With more and smaller ones the first sum begins earlier,
and each one costs the ring's latency once more.

The ways in which frameworks sum gradients, with the settings of each that are tried, and what carries them:

spantrain           ours (`runtime.gradients.step_sums`): beside the last backward, buckets by the link, two at once.
torch-ddp           `DistributedDataParallel`: buckets of 25 MiB, the first of 1 MiB, each summed as soon as it is whole
                    (Li et al., "PyTorch Distributed", VLDB 2020, sections 3.2 and 4.2; `_DEFAULT_BUCKET_CAP_MB`,
                    `dist._DEFAULT_FIRST_BUCKET_BYTES`), or all of the size that is given as `bucket_cap_mb`. Gloo has
                    two threads for them (`ProcessGroupGloo::Options`).
torch-fsdp          each unit's gradients summed to their holders behind its backward, beside the next unit's (Zhao et
                    al., "PyTorch FSDP", VLDB 2023, sections 3.2 and 4.3).
deepspeed-pipeline  all behind the last backward, in buckets of 500 million numbers (`_exec_reduce_grads` of its
                    `PipelineEngine`, `MEMORY_OPT_ALLREDUCE_SIZE`); so Megatron-DeepSpeed.
alpa                one sum behind the accumulation of all micro-batches (`AutoShardingOption.all_reduce_threshold` is
                    2^60); so Metis, which is built on it.

What a framework's user can choose is tuned: `sum_options` are the settings among which the best is taken.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import accumulate, count, takewhile
from typing import Annotated, Protocol, TypeVar

from spantrain.core.cluster import Device
from spantrain.core.plan import DEFAULT_BUCKET_BYTES, OWN_SUMS, GradientSums, SumModel
from spantrain.core.records import Bounds, Record
from spantrain.cost.rings import turns_s, waiting_s, without_repeats
from spantrain.devices.registry import find_backend

_SEGMENT_BYTES = 2**20
"""Most that Gloo sends at once (`kMaxSegmentSize`)."""

T = TypeVar("T")
Pair = tuple[str, str]
Place = tuple[str, str]


class Algorithm(Enum):
    """A way to sum."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


class Wires(Protocol):
    """What sums are carried by."""

    def latency_s(self, source: str, target: str) -> float:
        """Return the seconds of the way from a device to another."""

    def busy_together_s(self, pairs: Sequence[Pair], size_bytes: float, beside: Sequence[Pair]) -> list[float]:
        """Return for how long each pair is busy with its message when all pairs, and those beside, send at once."""

    def place(self, device: str) -> Place:
        """Return the site and host of a device."""


class Words(Enum):
    """Which words of its receiver, that it is ready, a ring waits for."""

    NONE = "none"
    FIRST = "first"
    EACH = "each"
    """Before every segment, as in rings of Gloo."""


class SumOptions(Record):
    """How a sum is done."""

    beside: tuple[tuple[str, ...], ...] = ()
    """Devices of other rings that sum at the same time, each in its order: links that they use too are shared."""
    words: Words = Words.NONE
    at_once: Annotated[int, Bounds(low=1)] = 1
    """Sums of this size that rings do at the same time; the seconds are those of all of them."""


class Collectives:
    """Seconds of sums over given wires."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def seconds(
        self,
        devices: Sequence[str],
        size_bytes: float,
        algorithm: Algorithm = Algorithm.RING,
        options: SumOptions | None = None,
    ) -> float:
        """Return the seconds in which each of the devices gets the sum of so many bytes; rings are in their order.

        Raises:
            ProfileError: a pair that must talk was not measured.
        """
        chosen = options or SumOptions()
        if len(devices) < 2:
            return 0.0
        match algorithm:
            case Algorithm.RING:
                return self._ring_s(devices, size_bytes, chosen)
            case Algorithm.TREE:
                up = list(_tree_levels(devices))
                down = [[(b, a) for a, b in pairs] for pairs in up]
                beside = [pair for other in chosen.beside for pair in around(other)]
                return sum(self._level_s(pairs, size_bytes, beside) for pairs in (*up, *down))
            case Algorithm.HIERARCHICAL:
                return self._hierarchical_s(devices, size_bytes, chosen)

    def fastest(self, devices: Sequence[str], size_bytes: float) -> tuple[Algorithm, float]:
        """Return the fastest algorithm with its seconds; of equal ones the first, ring, tree, hierarchical."""
        times = ((algorithm, self.seconds(devices, size_bytes, algorithm)) for algorithm in Algorithm)
        return min(times, key=lambda entry: entry[1])

    def broadcast_s(self, devices: Sequence[str], size_bytes: float) -> float:
        """Return the seconds in which all devices get what the first one has, down a binomial tree."""
        levels = reversed(list(_tree_levels(devices)))
        return sum(self._level_s([(b, a) for a, b in pairs], size_bytes, ()) for pairs in levels)

    def gather_s(self, devices: Sequence[str], size_bytes: float, options: SumOptions | None = None) -> float:
        """Return the seconds in which devices that hold a part each get all of it: half of a ring's turns.

        The other half, in which each gets its part of the sum (reduce-scatter), takes as long. Those of Gloo are taken
        not to wait for words.
        """
        return self._ring_s(devices, size_bytes, options or SumOptions(), halves=1) if len(devices) > 1 else 0.0

    def _ring_s(self, devices: Sequence[str], size_bytes: float, options: SumOptions, halves: int = 2) -> float:
        pairs = around(devices)
        beside = [pair for other in options.beside for pair in around(other)]
        latency_s = [self._wires.latency_s(*pair) for pair in pairs]
        piece = size_bytes / len(devices)
        waits = options.words is Words.EACH and halves == 2
        segments = max(2, math.ceil(piece / _SEGMENT_BYTES)) if waits else 1
        busy_s = [options.at_once * seconds for seconds in self._wires.busy_together_s(pairs, piece / segments, beside)]
        hops = without_repeats(latency_s, busy_s)
        if waits:
            return halves * waiting_s(*hops, segments * (len(devices) - 1))
        word_s = max(self._wires.latency_s(b, a) for a, b in pairs) if options.words is Words.FIRST else 0.0
        return word_s + turns_s(*hops, halves * (len(devices) - 1))

    def _level_s(self, pairs: Sequence[Pair], size_bytes: float, beside: Sequence[Pair]) -> float:
        """Return the seconds of one turn of a tree."""
        busy_s = self._wires.busy_together_s(pairs, size_bytes, beside)
        return max(self._wires.latency_s(*pair) + busy for pair, busy in zip(pairs, busy_s, strict=True))

    def _hierarchical_s(self, devices: Sequence[str], size_bytes: float, options: SumOptions) -> float:
        total_s, leaders = 0.0, tuple(devices)
        for level in (2, 1, 0):
            groups: dict[tuple[str, ...], list[str]] = {}
            for device in leaders:
                groups.setdefault(self._wires.place(device)[:level], []).append(device)
            rings = [tuple(group) for group in groups.values() if len(group) > 1]
            beside = {ring: (*options.beside, *(other for other in rings if other != ring)) for ring in rings}
            seconds = (
                self._ring_s(ring, size_bytes, replace(options, beside=others)) for ring, others in beside.items()
            )
            total_s += max(seconds, default=0.0)
            leaders = tuple(group[0] for group in groups.values())
        return total_s


def around(devices: Sequence[T]) -> list[tuple[T, T]]:
    """Return each member of a ring with the next one, the last with the first; nothing for one alone."""
    return list(zip(devices, (*devices[1:], devices[0]), strict=True)) if len(devices) > 1 else []


def _tree_levels(devices: Sequence[str]) -> Iterator[list[Pair]]:
    """Yield who sends whom on each level of a binomial tree, from the leaves up.

    >>> list(_tree_levels("abcde"))
    [[('b', 'a'), ('d', 'c')], [('c', 'a')], [('e', 'a')]]
    """
    step = 1
    while step < len(devices):
        yield [(devices[r + step], devices[r]) for r in range(0, len(devices) - step, 2 * step)]
        step *= 2


class SumBucket(Record):
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


def words_between(devices: Sequence[Device], model: SumModel = SumModel.SPANTRAIN) -> Words:
    """Return which words a ring over devices waits for, in a framework's sums."""
    if nccl_between(devices):
        return Words.NONE
    spread = model is SumModel.SPANTRAIN and len({device.site for device in devices}) > 1
    return Words.FIRST if spread else Words.EACH


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
    names, words = [device.name for device in devices], words_between(devices)
    ways = ((size_bytes, 1),) if words is Words.NONE else ((size_bytes, 1), (size_bytes / 2, 2))
    return min(
        collectives.seconds(names, size, options=SumOptions(words=words, at_once=at_once)) for size, at_once in ways
    )
