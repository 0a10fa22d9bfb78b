"""Reckoned against measured tensor parallelism: `benchmarks/tensor_parallel_accuracy.py DIR [--json]`.

DIR holds figures that others measured: seconds of a transformer block by kind of device, micro-batch and
tensor-parallel degree, its parameters and activations by degree, and bandwidth inside hosts (docs/simulator.md). From
degree 1 and the bandwidth alone, `cost.compute` and `cost.memory` reckon the higher degrees; the table has reckoned
over measured. Everything in DIR was measured on real devices, by others; nothing is measured or emulated here.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.profile import BandwidthCurve, BandwidthPoint, LinkMeasurement, Profile, Provenance, UnitTiming
from spantrain.core.shares import even_share
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.cost.compute import GroupCost
from spantrain.errors import SpanTrainError
from spantrain_studies.reference.folder import read_reference
from spantrain_studies.reference.network import curve_bandwidth_bytes_per_s
from spantrain_studies.reference.types import FLOAT_BYTES, LayerTimes, LinkCurve, Reference, ReferenceModel

SUMS_OF_BLOCK = 2
BLOCK = "transformer_block"
_BLOCK_UNIT = 1
_SIZES = [2**power for power in range(16, 31)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model on a kind of device at one degree: reckoned over measured, and the range over micro-batches."""

    model: str
    kind: str
    tp_degree: int
    micro_batches: int
    forward: tuple[float, float, float]
    """Smallest, median, largest."""
    backward: tuple[float, float, float]
    parameters: float
    activations: float


def rows(reference: Reference) -> Iterator[Row]:
    """Yield a row for every model, kind and degree that was measured beside degree 1."""
    for model in reference.models.values():
        layer = [index for index, role in enumerate(model.roles) if role.startswith(BLOCK)]
        timed = sorted({(kind, degree) for kind, _, degree in model.times if degree > 1})
        for kind, degree in timed:
            curve = reference.inside.get((kind, degree))
            sizes = [n for k, n, d in model.times if (k, d) == (kind, degree) and (kind, n, 1) in model.times]
            if layer and curve is not None and sizes:
                yield _row(model, layer[len(layer) // 2], kind, degree, sorted(sizes), curve)


def _row(model: ReferenceModel, layer: int, kind: str, degree: int, sizes: list[int], curve: LinkCurve) -> Row:
    profile = _profile(model, layer, kind, degree, sizes, curve)
    cost, names = GroupCost(profile), tuple(device.name for device in profile.cluster.devices)
    ratios: dict[Op, list[float]] = {Op.FORWARD: [], Op.BACKWARD: []}
    for samples in sizes:
        measured = model.times[kind, samples, degree]
        for op, seconds in ((Op.FORWARD, measured.forward_s), (Op.BACKWARD, measured.backward_s)):
            units = range(_BLOCK_UNIT, _BLOCK_UNIT + 1)
            reckoned_s = cost.seconds(units, names, (1.0,) * degree, op, samples)
            ratios[op].append(reckoned_s / seconds[layer])
    found = model.sizes_by_tp[degree]
    graph, units = profile.graph, range(_BLOCK_UNIT, _BLOCK_UNIT + 1)
    return Row(
        model=model.name,
        kind=kind,
        tp_degree=degree,
        micro_batches=len(sizes),
        forward=_spread(ratios[Op.FORWARD]),
        backward=_spread(ratios[Op.BACKWARD]),
        parameters=sum(graph.held_parameter_bytes(units, even_share(degree))) / FLOAT_BYTES / found.parameters[layer],
        activations=graph.held_activation_bytes(_BLOCK_UNIT, even_share(degree))
        / FLOAT_BYTES
        / found.activation_floats[layer],
    )


def _spread(values: list[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def _profile(model: ReferenceModel, layer: int, kind: str, degree: int, sizes: list[int], curve: LinkCurve) -> Profile:
    """Return a profile of one block between two empty units, with timings of degree 1 only."""
    sizes_of = model.sizes_by_tp[1]
    output = TensorSpec(
        name="hidden",
        shape_per_sample=(),
        dtype="float32",
        bytes_per_sample=round(FLOAT_BYTES * sizes_of.output_floats[layer]),
    )

    def unit(name: str, parameters: float, held: float, sums: int) -> Unit:
        return Unit(
            name=name,
            unit_class=name,
            parameter_bytes=round(FLOAT_BYTES * parameters),
            forward_flop_per_sample=0.0,
            outputs=(output,),
            activation_bytes_per_sample=round(FLOAT_BYTES * held),
            tensor_sums=sums,
        )

    block = unit("block", sizes_of.parameters[layer], sizes_of.activation_floats[layer], SUMS_OF_BLOCK)
    return Profile(
        cluster=_host(kind, degree),
        model=ModelSpec(name=model.name, family="gpt2", config={}, dataset="none"),
        graph=UnitGraph(units=(unit("before", 0, 0, 0), block, unit("behind", 0, 0, 0)), shared_bytes={}),
        dtype="float32",
        timings=tuple(
            timing for samples in sizes for timing in _timings(kind, samples, model.times[kind, samples, 1], layer)
        ),
        links=_links(degree, curve),
        scores=(),
        provenance=Provenance(
            created="", spantrain_version="", torch_version="", machine="", method="", compute_s=0.0, network_s=0.0
        ),
    )


def _timings(kind: str, samples: int, times: LayerTimes, layer: int) -> Iterator[UnitTiming]:
    """Yield the block's timings and those of the empty units; the backward was measured whole, so it stands under I."""
    for name in ("before", "block", "behind"):
        at_work = name == "block"
        yield UnitTiming(
            unit_class=name,
            kind=kind,
            dtype="float32",
            samples=samples,
            forward_s=times.forward_s[layer] if at_work else 0.0,
            backward_input_s=times.backward_s[layer] if at_work else 0.0,
            backward_weight_s=0.0,
        )


def _links(degree: int, curve: LinkCurve) -> tuple[LinkMeasurement, ...]:
    points = tuple(
        BandwidthPoint(size_bytes=size, bandwidth_bytes_per_s=curve_bandwidth_bytes_per_s(curve, size))
        for size in _SIZES
    )
    return tuple(
        LinkMeasurement(
            source=f"d{a}",
            target=f"d{b}",
            latency_s=0.0,
            bandwidth_bytes_per_s=curve.max_bandwidth_bytes_per_s,
            payload_bytes=_SIZES[-1],
            rounds=1,
            curve=BandwidthCurve(points=points),
        )
        for a in range(degree)
        for b in range(degree)
        if a != b
    )


def _host(kind: str, count: int) -> Cluster:
    names = tuple(f"d{number}" for number in range(count))
    return Cluster(
        name="one host",
        kinds=(
            DeviceKind(
                name=kind,
                peak_fp16_flop_per_s=1.0,
                peak_fp32_flop_per_s=1.0,
                memory_bytes=1,
                memory_bandwidth_bytes_per_s=1.0,
                power_w=0.0,
                source="not used",
            ),
        ),
        sites=(Site(name="here", hosts=("one",), bandwidth_bytes_per_s=1.0, latency_s=0.0),),
        hosts=(Host(name="one", site="here", devices=names),),
        devices=tuple(
            Device(name=name, kind=kind, host="one", site="here", backend="cuda:0", memory_bytes=1) for name in names
        ),
        links=(),
    )


def show(found: list[Row]) -> None:
    """Print the rows and what they come to."""
    table = Table(title="a transformer block on a tensor-parallel group: reckoned / measured")
    for name in ("model", "kind", "degree", "sizes", "F (least-most)", "B (least-most)", "parameters", "activations"):
        table.add_column(name, justify="left" if name in ("model", "kind") else "right")
    for row in found:
        table.add_row(
            row.model, row.kind, str(row.tp_degree), str(row.micro_batches), _range(row.forward), _range(row.backward),
            f"{row.parameters:.3f}", f"{row.activations:.3f}",
        )  # fmt: skip
    console = Console(width=130)
    console.print(table)
    for name in ("forward", "backward"):
        medians = [getattr(row, name)[1] for row in found]
        console.print(
            f"{name}: median of the rows {statistics.median(medians):.2f}, {min(medians):.2f} to {max(medians):.2f}"
        )


def _range(values: tuple[float, float, float]) -> str:
    return f"{values[1]:.2f} ({values[0]:.2f}-{values[2]:.2f})"


def main() -> int:
    """Read, reckon, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="rows as JSON, and nothing else, on standard output")
    options = parser.parse_args()
    try:
        found = list(rows(read_reference(options.folder)))
    except SpanTrainError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.json:
        print(json.dumps([asdict(row) for row in found]))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
