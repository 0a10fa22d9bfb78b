"""Seconds that the data sheet of a kind of device lets one expect: the law that emulated devices follow.

Matrix products and convolutions at a part of the peak rate; then, since kernels run one after another, what moves
activations to and from memory (normalization, attention's scores, activation functions, dropout); and a fixed cost per
operation. For a unit with `flop` operations and `held` bytes of activations per sample, and `fixed` bytes of
parameters, one of F, I and W on n samples takes

    seconds = (flop * (n + n_half) / (COMPUTE_EFFICIENCY * peak)
               + (fixed + HELD_PASSES * held * n) / (MEMORY_EFFICIENCY * memory bandwidth)) / speed  +  launch

`n_half` is the number of samples at which half of the full rate is reached: small batches use a device badly, so time
is not linear in samples (Asteroid, section 3.1 and figure 6, shows the same on boards). A large sample fills a device
by itself: n_half is what it computes in `SATURATION_S` of its full speed, and at most `HALF_RATE_SAMPLES`. I and W each
do as many operations as F and move as many bytes; B = I + W. An operation of no flop (an embedding, a lookup) has no I,
since nobody waits for the gradient of integers.

Efficiencies and passes fit measured training of 13 kinds and 7 models (`benchmarks/data_sheets.py`, docs/planner.md).

`speed` is `Cluster.emulated_speed`. Everything that a device does scales with 1/speed, so ratios between devices,
units and operations are the real ones; only `launch`, a few microseconds in which the host starts an operation, is not
the device's and stays, being as many for a model scaled down with its devices as for the full-size one.

`analytic_profile` makes a whole profile of it, for planning on a cluster of which nothing was measured.
"""

from collections.abc import Iterable, Sequence

from spantrain.core.action import SPLIT_OPS, Op
from spantrain.core.cluster import Cluster, DeviceKind
from spantrain.core.profile import DeviceScore, Profile, Provenance, UnitTiming
from spantrain.core.records import Positive, Record, check_bounds
from spantrain.core.units import ModelSpec, Unit, UnitGraph
from spantrain.formats.precision import check_dtype
from spantrain.version import VERSION

ANALYTIC_METHOD = "nothing was measured: compute by the kinds' data sheets, links as the cluster describes them"
"""How an analytic profile says what it is."""

COMPUTE_EFFICIENCY = 0.75
"""Part of the peak rate that large products and convolutions reach."""

MEMORY_EFFICIENCY = 0.75
"""Part of the memory bandwidth that plain copies and element-wise work reach."""

HELD_PASSES = 3
"""So often each of F, I and W moves what is held of a sample: operations between products read and write it anew."""

HALF_RATE_SAMPLES = 0.5
"""n_half of small samples: this many samples' worth of time is lost in every operation."""

SATURATION_S = 70e-6
"""n_half of large samples is what a device computes in so many seconds at its full speed: an assumption, the time of a
few launches. Blocks of GPT-Neo and OPT that are timed alone lose about 200 µs in each of F, I and W, most of which a
running step hides."""

LAUNCH_S = 20e-6
"""Seconds of the host for one operation of one unit."""


def peak_flop_per_s(kind: DeviceKind, dtype: str) -> float:
    """Return the operations per second of a data sheet; low precision runs at the 16-bit peak."""
    return kind.peak_fp32_flop_per_s if dtype == "float32" else kind.peak_fp16_flop_per_s


class AnalyticLaw(Record):
    """Seconds of work on one kind of device, at a fraction of its real speed.

    Raises:
        ValueError: the speed is not positive, or there is no such dtype.
    """

    kind: DeviceKind
    speed: Positive
    dtype: str

    def __post_init__(self) -> None:
        check_bounds(self)
        check_dtype(self.dtype)

    @property
    def flop_per_s(self) -> float:
        """Operations per second in large products."""
        return COMPUTE_EFFICIENCY * peak_flop_per_s(self.kind, self.dtype) * self.speed

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second to and from the device's memory."""
        return MEMORY_EFFICIENCY * self.kind.memory_bandwidth_bytes_per_s * self.speed

    def flop_seconds(self, flop: float) -> float:
        """Return the seconds of one large piece of work of so many operations."""
        return flop / self.flop_per_s + LAUNCH_S

    def seconds(self, unit: Unit, op: Op, samples: int) -> float:
        """Return the seconds of one operation of a unit on so many samples.

        Raises:
            ValueError: `samples` is less than one.
        """
        if samples < 1:
            raise ValueError(f"{op.value} of {unit.name}: samples must be at least 1, got {samples}")
        match op:
            case Op.BACKWARD:
                return sum(self.seconds(unit, half, samples) for half in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
            case Op.BACKWARD_INPUT if unit.forward_flop_per_sample == 0:
                return 0.0
            case Op.BACKWARD_INPUT | Op.BACKWARD_WEIGHT if not unit.goes_back:
                return 0.0
            case Op.BACKWARD_WEIGHT if unit.frozen_bytes:
                return self._one_pass(unit, samples) * unit.trained_bytes / unit.parameter_bytes + LAUNCH_S
            case _:
                return self._one_pass(unit, samples) + LAUNCH_S

    def training_seconds(self, units: Iterable[Unit], samples: int) -> float:
        """Return the seconds of forward and backward through units."""
        return sum(self.seconds(unit, op, samples) for unit in units for op in SPLIT_OPS)

    def marginal_seconds(self, units: Sequence[Unit]) -> float:
        """Return what one sample more takes, forward and backward: the seconds are a line over the samples."""
        return self.training_seconds(units, 2) - self.training_seconds(units, 1)

    def _one_pass(self, unit: Unit, samples: int) -> float:
        flop = unit.forward_flop_per_sample
        lost_flop = min(HALF_RATE_SAMPLES * flop, SATURATION_S * self.flop_per_s / self.speed)
        moved_bytes = unit.parameter_bytes + HELD_PASSES * unit.activation_bytes_per_sample * samples
        return (flop * samples + lost_flop) / self.flop_per_s + moved_bytes / self.bytes_per_s


def analytic_profile(
    cluster: Cluster, model: ModelSpec, graph: UnitGraph, *, dtype: str = "float32", most_samples: int = 1024
) -> Profile:
    """Return a profile by the law of the kinds and the described network; nothing is measured, and it says so.

    Times are at the powers of two up to `most_samples`. `created` is empty: nothing happened at any time.

    Raises:
        ValueError: there is no such dtype.
    """
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    laws = [AnalyticLaw(kind=cluster.kind_by_name[k], speed=cluster.emulated_speed, dtype=dtype) for k in kinds]
    classes = {unit.unit_class: unit for unit in graph.units}
    rate = {law.kind.name: law.flop_per_s / 1e12 for law in laws}
    sizes = [2**power for power in range(most_samples.bit_length())]
    return Profile(
        cluster=cluster,
        model=model,
        graph=graph,
        dtype=dtype,
        timings=tuple(
            UnitTiming(
                unit_class=name,
                kind=law.kind.name,
                dtype=dtype,
                samples=samples,
                forward_s=law.seconds(unit, Op.FORWARD, samples),
                backward_input_s=law.seconds(unit, Op.BACKWARD_INPUT, samples),
                backward_weight_s=law.seconds(unit, Op.BACKWARD_WEIGHT, samples),
                source="analytic",
            )
            for name, unit in classes.items()
            for law in laws
            for samples in sizes
        ),
        links=(),
        scores=tuple(DeviceScore(device=d.name, score=rate[d.kind], task_s={}) for d in cluster.devices),
        provenance=Provenance(
            created="",
            spantrain_version=VERSION,
            torch_version="",
            machine="",
            method=ANALYTIC_METHOD,
            compute_s=0.0,
            network_s=0.0,
        ),
        links_described=True,
    )
