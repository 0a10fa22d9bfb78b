"""Wire formats of cuts: `benchmarks/wire_formats.py [PART ...]`; all of them if none is named.

loss        after a fixed number of samples, over seeds, beside float32's; and beside a control, float32 whose
            activations are changed at each cut in their last bits: so much do two exact runs differ by chance.
            Emulated: the pipeline, in one process, with what really is sent at each cut there and back. Real: the rest.
gradients   of all parameters in one step: how far off where activations or gradients are rounded at the cuts, gradients
            with error feedback and without. Emulated: the pipeline, as above.
throughput  of a pipeline over a narrow link. Emulated: two devices (their time; the computation is real) and the link.
            Real: processes, messages, this machine's processors.
encoding    bytes of float32 in a second, one thread. Real; the best of several runs.

Writes its tables, plots and JSON to `benchmarks/results/`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import wire_gradients
from results import line_plot, save
from spantrain.formats.registry import WireFormat
from spantrain.runtime.step.rounding import ErrorFeedback, for_wire, from_wire
from wire_loss import LAST_STEPS, Losses, Setting, back, other_bits, there, train
from wire_throughput import GLOBAL_BATCH, MICRO_BATCH, MODEL, measure

BOUNDS = {"bfloat16": 0.005, "int8": 0.01}
"""By how much the loss may be over float32's, in the mean over seeds."""
CONTROL = "float32, other last bits"
FASTER = 1.9
"""How many times as fast int8 is as bfloat16 where the link is the limit."""
SHAPES = ((1, 512, 768), (8, 512, 768), (4, 64, 64))
"""Of activations that are encoded: [samples, tokens, hidden]."""
LOSS_MODEL = "gpt2-tiny"
PARTS = ("encoding", "gradients", "throughput", "loss")
REPEATS = 15

LossRows = dict[str, dict[str, float | list[float]]]
"""By what is sent: held-out loss, that over float32's, by seed, and the last training steps'."""


def measure_loss(setting: Setting, seeds: int, forms: Sequence[WireFormat]) -> bool:
    """Train with each format and each seed, print, write, and say whether the bounds hold."""

    def same(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    ways = {"float32": (same, same), CONTROL: (other_bits, same)}
    ways |= {form.value: (there(form), back(form)) for form in forms}
    runs: dict[str, list[Losses]] = {name: [] for name in ways}
    for seed in range(seeds):
        for name, (forward, backward) in ways.items():
            runs[name].append(train(setting, seed, forward, backward))
            print(f"seed {seed}  {name:24} held out {runs[name][-1].held_out:.4f}", flush=True)
        table, rows = _loss_table(setting, runs)
        data = {"emulated": "pipeline", "setting": asdict(setting), "rows": rows}
        save("wire_formats_loss", table, data, _loss_plot(setting, runs))
    print("\n".join(table))
    return all(_within(rows, name) for name in BOUNDS if name in rows)


def _within(rows: LossRows, name: str) -> bool:
    ratio = rows[name]["ratio"]
    assert isinstance(ratio, float)
    return abs(ratio) <= BOUNDS[name]


def _loss_plot(setting: Setting, runs: dict[str, list[Losses]]) -> str:
    lines = {
        name: [(float(step), statistics.mean(run.training[step] for run in own)) for step in range(setting.steps)]
        for name, own in runs.items()
    }
    title = f"Training loss, {setting.model}, mean of {len(runs['float32'])} seeds"
    return line_plot(lines, title=title, across="steps", up="loss")


def _loss_table(setting: Setting, runs: dict[str, list[Losses]]) -> tuple[list[str], LossRows]:
    """Return the lines of the table, and the same as data."""
    base = runs["float32"]
    table = [
        f"{setting.model}, {setting.cuts} cuts, {setting.steps} steps of {setting.batch} samples, learning rate "
        f"{setting.learning_rate:g} falling to 0, {len(base)} seeds",
        f"loss on held-out samples, and of the last {LAST_STEPS} training steps; over float32's: mean and by seed",
        "",
        f"{'sent as':25} {'held out':>9} {'over float32':>13}   {'by seed':25} {'training':>9} {'over float32':>13}",
    ]
    rows: LossRows = {}
    for name, own in runs.items():
        held, last = statistics.mean(r.held_out for r in own), statistics.mean(r.last for r in own)
        over = held / statistics.mean(r.held_out for r in base) - 1
        over_last = last / statistics.mean(r.last for r in base) - 1
        by_seed = [r.held_out / other.held_out - 1 for r, other in zip(own, base, strict=True)]
        rows[name] = {"held_out": held, "ratio": over, "by_seed": by_seed, "last": last, "last_ratio": over_last}
        seeds = " ".join(f"{100 * part:+.2f}" for part in by_seed)
        table.append(f"{name:25} {held:9.4f} {100 * over:+12.2f} %   {seeds:25} {last:9.4f} {100 * over_last:+12.2f} %")
    for name in (name for name in BOUNDS if name in rows):
        verdict = "holds" if _within(rows, name) else "does not hold"
        table.append(
            f"wanted: {name} within {BOUNDS[name]:.1%} of float32 on held-out samples, mean over seeds: {verdict}"
        )
    return table, rows


def measure_encoding() -> None:
    """Time `for_wire` and `from_wire` of each format, print and write."""
    torch.set_num_threads(1)
    table = [
        f"GB of float32 in a second, one thread, best of {REPEATS}: encoded, gradients (error feedback), decoded",
        "",
        f"{'samples, tokens, hidden':>24} {'sent as':>9} {'encoded':>8} {'gradients':>10} {'decoded':>8} {'bytes':>7}",
    ]
    rows = []
    for shape in SHAPES:
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for form in (form for form in WireFormat if form is not WireFormat.NATIVE):
            rates, part = _encoding_rates(tensor, form)
            figures = f"{rates[0]:8.2f} {rates[1]:10.2f} {rates[2]:8.2f} {part:7.1%}"
            table.append(f"{', '.join(map(str, shape)):>24} {form.value:>9} {figures}")
            rows.append({"shape": shape, "sent_as": form.value, "gb_per_s": rates, "bytes_ratio": part})
    print("\n".join(table))
    save("wire_formats_encoding", table, {"rows": rows})


def _encoding_rates(tensor: torch.Tensor, form: WireFormat) -> tuple[list[float], float]:
    """Return GB of float32 in a second, as the table has them, and the part of its bytes that is sent."""
    sent, feedback = for_wire((tensor,), form), ErrorFeedback()
    ways = (
        partial(for_wire, (tensor,), form),
        partial(feedback.for_wire, (tensor,), form),
        partial(from_wire, sent, form),
    )
    return [tensor.nbytes / _best_s(work) / 1e9 for work in ways], sent[0].nbytes / tensor.nbytes


def measure_throughput(rate_kbit_per_s: float, steps: int, forms: Sequence[WireFormat]) -> bool:
    """Train over a narrow link, print, write, and say whether int8 is as much faster as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(rate_kbit_per_s, steps, forms, Path(folder))
    by_name = {row.sent_as: row for row in rows}
    base = by_name.get(WireFormat.BFLOAT16.value, rows[0])
    over = f"over {base.sent_as}"
    table = [
        f"{MODEL} in two parts over {rate_kbit_per_s:g} kbit/s, {GLOBAL_BATCH} samples a step in micro-batches of "
        f"{MICRO_BATCH}, median of {steps} steps but the first two",
        "",
        f"{'sent as':>9} {'s a step':>9} {over:>13} {'kB a step':>10} {'real compute':>12}",
        *(
            f"{row.sent_as:>9} {row.step_s:9.3f} {base.step_s / row.step_s:12.2f}x "
            f"{row.bytes_per_step / 1e3:10.1f} {row.real_compute_ratio:12.0%}"
            for row in rows
        ),
    ]
    holds = True
    if {WireFormat.BFLOAT16.value, WireFormat.INT8.value} <= by_name.keys():
        faster = base.step_s / by_name[WireFormat.INT8.value].step_s
        holds = faster >= FASTER
        verdict = "holds" if holds else "does not hold"
        table.append(f"wanted: int8 at least {FASTER} times as fast as bfloat16; is {faster:.2f}: {verdict}")
    print("\n".join(table))
    data = {"emulated": "network and the devices' time", "rate_kbit_per_s": rate_kbit_per_s}
    save("wire_formats_throughput", table, data | {"rows": [asdict(row) for row in rows]})
    return holds


def measure_gradients(setting: Setting) -> None:
    """Compare gradients, print and write."""
    found = wire_gradients.measure(setting, seed=0)
    table = [
        f"gradients of all parameters after {setting.steps} exact steps of {setting.batch} samples, {setting.model}, "
        f"{setting.cuts} cuts: part of their norm that is error; of the sum of {wire_gradients.BATCHES} batches",
        "",
        f"{'sent as':>9} {'what':28} {'one batch':>10} {'sum':>8}",
        *(f"{row.sent_as:>9} {row.what:28} {row.error:10.3%} {row.error_of_sum:8.3%}" for row in found),
    ]
    print("\n".join(table))
    save("wire_formats_gradients", table, {"setting": asdict(setting), "rows": [asdict(row) for row in found]})


def _best_s(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    names = [form.value for form in WireFormat]
    parser.add_argument("--formats", nargs="+", choices=names, default=names, help="of the losses and the link")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate-kbit-per-s", type=float, default=100)
    parser.add_argument("--link-steps", type=int, default=4)
    options = parser.parse_args()
    if set(options.parts) - set(PARTS) or options.seeds < 1:
        parser.error(f"parts are {', '.join(PARTS)}, got {', '.join(options.parts)}; --seeds must be at least 1")
    forms = [WireFormat(name) for name in options.formats]
    holds = True
    if "encoding" in options.parts:
        measure_encoding()
    if "throughput" in options.parts:
        holds &= measure_throughput(options.rate_kbit_per_s, options.link_steps, forms)
    setting = Setting(
        model=LOSS_MODEL, steps=options.steps, batch=options.batch, cuts=3, learning_rate=options.learning_rate
    )
    if "gradients" in options.parts:
        measure_gradients(setting)
    if "loss" in options.parts:
        holds &= measure_loss(setting, options.seeds, [form for form in forms if form is not WireFormat.NATIVE])
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
