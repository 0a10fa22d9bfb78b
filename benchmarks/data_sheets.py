"""Print what the data-sheet law expects of real devices, beside what was measured on them.

python benchmarks/data_sheets.py [--reference ../shared/reference] [--save]

Nothing is emulated and nothing is trained here. Measured by others: Lambda's PyTorch benchmark (BERT base and large on
SQuAD at 384 tokens, ResNet-50 at 224 pixels, one script for all cards; github.com/lambdal/deeplearning-benchmark,
`pytorch-train-throughput-fp16.csv` and `-fp32.csv`, containers of 2022 that round products to TF32 where a card can);
with `--reference`, one block of OPT-350M and GPT-Neo-2.7B on six kinds (the profiles of Sailor's artefact, float32,
TF32 where a card can); and GPT-2 small and a Llama of 1B on an H100 (`benchmarks/gpu.py`, bfloat16 by autocast).

Operations and held bytes of BERT (attention unfused, as in that benchmark) and ResNet are counted here on
transformers' models, once in each precision; those of
OPT and GPT-Neo follow from their shapes and the profile; those of GPT-2 and Llama are of our own unit graphs. Left out:
the optimizer's update, which is some per cent of a step. `error` is (expected - measured) / measured of seconds.

The last lines say how good a roofline is that takes the larger of both, as it was and fitted as well, and fit the law's
two constants anew without each kind, and without each model, and say how far the law is
off on what it had not seen: the figure to quote.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForQuestionAnswering, ResNetConfig, ResNetForImageClassification

import gpu
import results
from spantrain.config.kinds import load_kinds
from spantrain.core.cluster import DeviceKind
from spantrain.core.units import Unit
from spantrain.cost import analytic
from spantrain.models.graph import build_graph
from spantrain.models.sources import hf_spec

MODELS = ("bert-base", "bert-large", "resnet-50")
LAMBDA = {
    # Samples a second in float16 and in float32, by model; H100 SXM is the median of four machines.
    "rtx-8000": ((146, 50, 651), (41, 12, 274)),
    "v100": ((189, 57, 833), (42, 12, 369)),
    "rtx-3090": ((172, 52, 905), (85, 24, 513)),
    "a10": ((135, 42, 638), (70, 19, 349)),
    "a100": ((368, 117, 1396), (179, 53, 882)),
    "a100-80gb": ((443, 152, 1582), (239, 75, 1066)),
    "rtx-6000-ada": ((255, 79, 1146), (136, 44, 647)),
    "rtx-a6000": ((198, 68, 916), (101, 33, 514)),
    "rtx-4090": ((297, 93, 1301), (137, 44, 721)),
    "h100-pcie": ((567, 203, 1866), (292, 97, 1197)),
    "h100": ((866, 308, 2778), (434, 147, 1893)),
}
BATCH = {"bert-base": 96, "bert-large": 28, "resnet-50": 448}
"""Samples at once: those of the cards of 24 GB."""
WITHOUT_TF32 = ("v100", "rtx-8000", "titan-rtx", "rtx-2080-ti")
REFERENCE_KINDS = {
    "A100-40": "a100", "A100-80": "a100-80gb", "V100-16": "v100", "RTX-2080": "rtx-2080-ti", "Titan-RTX": "titan-rtx",
    "RTX-3090": "rtx-3090",
}  # fmt: skip
REFERENCE_SHAPES = {"OPT-350": (1024, 2048), "GPT-Neo-2.7": (2560, 2048)}
"""Hidden size and tokens of the models whose blocks the profiles have timed."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of forward and backward of so many samples of something on a device."""

    kind: DeviceKind
    model: str
    dtype: str
    """`float32`, `bfloat16`, or `tf32`: float32 whose products are rounded."""
    samples: int
    units: tuple[Unit, ...]
    seconds: float

    @property
    def law(self) -> analytic.AnalyticLaw:
        """The law of the kind; products in TF32 take twice as long as in 16 bits on all cards that have it."""
        if self.dtype != "tf32":
            return analytic.AnalyticLaw(kind=self.kind, speed=1.0, dtype=self.dtype)
        kind = replace(self.kind, peak_fp32_flop_per_s=self.kind.peak_fp16_flop_per_s / 2)
        return analytic.AnalyticLaw(kind=kind, speed=1.0, dtype="float32")

    @property
    def error(self) -> float:
        """Of the law as it is."""
        return self.law.training_seconds(self.units, self.samples) / self.seconds - 1.0

    def error_with(self, efficiency: float, passes: float) -> float:
        """Of the law with other constants."""
        compute_s, moving_s = self.parts
        return (compute_s / efficiency + passes * moving_s) / self.seconds - 1.0

    @property
    def parts(self) -> tuple[float, float]:
        """Seconds of computing at the peak rate, and of moving once what is held."""
        law, kind = self.law, self.law.kind
        peak = kind.peak_fp32_flop_per_s if law.dtype == "float32" else kind.peak_fp16_flop_per_s
        flop = sum(unit.forward_flop_per_sample for unit in self.units) * self.samples
        held = sum(unit.activation_bytes_per_sample for unit in self.units) * self.samples
        return 3 * flop / peak, 3 * held / law.bytes_per_s


def main() -> int:
    """Print each measurement beside the law, then the errors on what is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--reference", type=Path, help="a folder with profiles_OPT-350.json and profiles_GPT-Neo-2.7.json"
    )
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [*_lambda(), *_ours()]
    if arguments.reference is None:
        print("without --reference: OPT-350M and GPT-Neo-2.7B are left out", file=sys.stderr)
    else:
        found += _reference(arguments.reference)
    table = [*_table(found), "", *_left_out(found)]
    print(*table, sep="\n")
    if arguments.save:
        rows = [
            {
                "kind": one.kind.name,
                "model": one.model,
                "dtype": one.dtype,
                "measured_s": one.seconds,
                "error": one.error,
            }
            for one in found
        ]
        results.save("data_sheets", table, {"rows": rows})
    return 0


def _table(found: Sequence[Measured]) -> Iterator[str]:
    columns = list(dict.fromkeys((one.model, _precision(one)) for one in found))
    yield f"{'kind':14}" + "".join(f"{model:>12}" for model, _ in columns)
    yield f"{'':14}" + "".join(f"{dtype:>12}" for _, dtype in columns)
    by_kind = defaultdict[str, dict[tuple[str, str], float]](dict)
    for one in found:
        by_kind[one.kind.name][one.model, _precision(one)] = one.error
    for kind, errors in by_kind.items():
        yield f"{kind:14}" + "".join(f"{errors[at]:>+12.0%}" if at in errors else f"{'':12}" for at in columns)
    sizes = [abs(one.error) for one in found]
    yield f"{len(found)} measurements of {len(by_kind)} kinds: off by {statistics.mean(sizes):.0%} in the mean, " + (
        f"{statistics.median(sizes):.0%} in the median, {max(sizes):.0%} at most; "
        f"{statistics.mean(one.error for one in found):+.0%} with the sign"
    )


def _precision(one: Measured) -> str:
    return "bfloat16" if one.dtype == "bfloat16" else "float32"


def _left_out(found: Sequence[Measured]) -> Iterator[str]:
    used = analytic.COMPUTE_EFFICIENCY, analytic.HELD_PASSES
    fitted = _fit(found)
    for what, constants in (("0.45 and 1", (0.45, 1.0)), ("fitted, too", _fit(found, _larger_error))):
        sizes = [_larger_error(one, *constants) for one in found]
        yield (
            f"the larger of both in the place of the sum, {what} ({constants[0]:.2f}, {constants[1]:.2f}): off by "
            f"{statistics.mean(map(abs, sizes)):.0%} in the mean; {statistics.mean(sizes):+.0%} with the sign"
        )
    yield f"efficiency and passes: {used[0]} and {used[1]} in use, {fitted[0]:.2f} and {fitted[1]:.2f} fitted to all"
    for what, name in (("kind", lambda one: one.kind.name), ("model", lambda one: one.model)):
        errors: list[float] = []
        for left in dict.fromkeys(map(name, found)):
            constants = _fit([one for one in found if name(one) != left])
            errors += [abs(one.error_with(*constants)) for one in found if name(one) == left]
        yield f"without a {what}: off on it by {statistics.mean(errors):.0%} in the mean, {max(errors):.0%} at most"


def _larger_error(one: Measured, efficiency: float, passes: float) -> float:
    """Return the error of a roofline that takes the larger of computing and moving, as the law before this did."""
    compute_s, moving_s = one.parts
    return max(compute_s / efficiency, passes * moving_s) / one.seconds - 1.0


def _fit(
    found: Sequence[Measured], error: Callable[[Measured, float, float], float] = Measured.error_with
) -> tuple[float, float]:
    """Return efficiency and passes by least squares of the logarithms, so that twice and half weigh the same."""

    def errors(constants: Sequence[float]) -> list[float]:
        return [math.log1p(error(one, *constants)) for one in found]

    efficiency, passes = least_squares(errors, (0.7, 3.0), bounds=((0.2, 0.0), (1.0, 20.0))).x
    return float(efficiency), float(passes)


def _lambda() -> Iterator[Measured]:
    for kind, by_precision in LAMBDA.items():
        for low, rates in zip((True, False), by_precision, strict=True):
            for model, samples_per_s in zip(MODELS, rates, strict=True):
                dtype = "bfloat16" if low else "float32" if kind in WITHOUT_TF32 else "tf32"
                yield Measured(
                    kind=load_kinds()[kind], model=model, dtype=dtype, samples=BATCH[model],
                    units=(_counted(model, low),), seconds=BATCH[model] / samples_per_s,
                )  # fmt: skip


@cache
def _counted(model: str, low: bool) -> Unit:
    """Return a model of transformers as one unit, its operations and held bytes counted on a sample."""
    if model == "resnet-50":
        return _unit(
            *_count(ResNetForImageClassification(ResNetConfig()), low, lambda: (torch.randn(2, 3, 224, 224),), 2)
        )
    size: dict[str, Any] = (
        {} if model == "bert-base" else {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    )
    layers = 12 if model == "bert-base" else 24

    def tokens() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 1000, (1, 384)), torch.ones(1, 384)

    # Layers are alike: two sizes tell what each adds.
    two, four = (
        np.array(
            _count(
                BertForQuestionAnswering(BertConfig(num_hidden_layers=n, attn_implementation="eager", **size)),
                low,
                tokens,
                1,
            )
        )
        for n in (2, 4)
    )
    return _unit(*(two + (layers - 2) * (four - two) / 2))


def _count(
    model: torch.nn.Module, low: bool, inputs: Callable[[], tuple[torch.Tensor, ...]], samples: int
) -> tuple[float, float, float]:
    """Return forward operations and held bytes of a sample, and bytes of parameters."""
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    shapes = {one.shape for one in model.parameters() if one.dim() > 1}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Autocast's copies of weights are no activations.
        a_weight = tensor.shape in shapes or tensor.T.shape in shapes if tensor.dim() == 2 else tensor.shape in shapes
        if tensor.untyped_storage().data_ptr() not in parameters and not a_weight:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=low),
        FlopCounterMode(display=False) as counter,
    ):
        output = model(*inputs())
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    del output
    sizes = 4.0 * sum(one.numel() for one in model.parameters())
    return counter.get_total_flops() / samples, held_bytes / samples, sizes


def _unit(flop: float, held_bytes: float, parameter_bytes: float) -> Unit:
    return Unit(
        name="all", unit_class="all", parameter_bytes=round(parameter_bytes), forward_flop_per_sample=flop, outputs=(),
        activation_bytes_per_sample=round(held_bytes),
    )  # fmt: skip


def _ours() -> Iterator[Measured]:
    """Yield what `benchmarks/gpu.py` measured of the plain loop, at its best micro-batch."""
    rows = json.loads((results.FOLDER / "gpu_h100.json").read_text())["rows"]
    plain = [row for row in rows if row["way"] == "plain loop"]
    for name in dict.fromkeys(row["case"] for row in plain):
        best = min((row for row in plain if row["case"] == name), key=lambda row: row["step_ms"])
        case = gpu.CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(case.config))
            graph = build_graph(hf_spec(folder, sequence_length=case.sequence), dtype="bfloat16")
        micro = best["micro_batch"]
        yield Measured(
            kind=load_kinds()["h100"], model=name, dtype="bfloat16", samples=micro, units=graph.units,
            seconds=best["step_ms"] / 1e3 * micro / case.global_batch,
        )  # fmt: skip


def _reference(folder: Path) -> Iterator[Measured]:
    """Yield a block of each model on each kind, at the micro-batch that takes the least of a sample."""
    for model, (hidden, tokens) in REFERENCE_SHAPES.items():
        profile = json.loads((folder / f"profiles_{model}.json").read_text())
        sizes = {key: values[1] for key, values in profile["memory_by_tp"]["1"].items()}
        weights = 12 * hidden**2
        unit = _unit(2 * weights * tokens + 4 * tokens**2 * hidden, 4 * sizes["act_mem_floats"], 4 * weights)
        for name, kind in REFERENCE_KINDS.items():
            timed = profile["timing_by_gpu"].get(name, {}).get("simulator", {})
            seconds = {
                int(n): row["1"]["forward_s"][1] + row["1"]["backward_s"][1] for n, row in timed.items() if "1" in row
            }
            if seconds:
                samples = min(seconds, key=lambda n: seconds[n] / n)
                dtype = "float32" if kind in WITHOUT_TF32 else "tf32"
                one = partial(Measured, kind=load_kinds()[kind], model=model, dtype=dtype)
                yield one(samples=samples, units=(unit,), seconds=seconds[samples])


if __name__ == "__main__":
    sys.exit(main())
