"""Print what it takes to measure what large models hold: without numbers, as by default, and with them.

python benchmarks/model_graphs.py [--save]

Every run is a process of its own, so that its most memory is its own. Runs with numbers that would take much longer
than a minute are left out. Nothing is emulated: `build_graph` is what every plan begins with where the model is not in
the catalogue. What both say is compared there, and for all units of the zoo of tests that run without numbers, which
are tiny: bytes held for a sample from F on and from I on, and the most that operations need besides.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import results
from spantrain.core.units import Unit
from spantrain.errors import ConfigError
from spantrain.models import graph as measuring
from spantrain.models.catalog.catalog import resolve_model
from testing.models.zoo.trial import FOLDER, names

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
LLAMA_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
FILES = {"llama-7b": LLAMA, "llama-70b": LLAMA_70B, "mixtral-8x7b": MIXTRAL}
CASES = (
    ("gpt2-small", 1024, "float32", True),
    ("gpt2-xl", 1024, "bfloat16", False),
    ("llama-7b", 128, "float32", True),
    ("llama-7b", 2048, "bfloat16", False),
    ("llama-7b", 8192, "bfloat16", False),
    ("llama-70b", 8192, "bfloat16-weights", False),
    ("mixtral-8x7b", 2048, "bfloat16", False),
)
"""Models, tokens of a sample, dtype, and whether it is measured with numbers too."""
ALL, NONE = "with", "without"


def measure(model: str, tokens: int, dtype: str, numbers: str) -> dict[str, float]:
    """Measure in this process; return seconds of the processor, the most GiB of memory, GiB held for a sample."""
    if numbers == ALL:
        measuring._LONG_FLOP = measuring._LARGE_BYTES = float("inf")
    spec = replace(resolve_model(model), sequence_length=tokens)
    began_s, clock_s = time.process_time(), time.perf_counter()
    found = measuring.build_graph(spec, dtype=dtype)
    return {
        "processor_s": time.process_time() - began_s,
        "clock_s": time.perf_counter() - clock_s,
        "most_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "held_gib": sum(unit.activation_bytes_per_sample for unit in found.units) / 2**30,
    }


def measured(folder: Path, model: str, tokens: int, dtype: str, numbers: str) -> dict[str, float]:
    """Measure in a process of its own."""
    if model in FILES:
        (folder / model).mkdir(exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(FILES[model]))
        model = f"hf:{folder / model}"
    words = [sys.executable, __file__, "--one", model, str(tokens), dtype, numbers]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    one: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return one


def compared(name: str, dtype: str) -> list[tuple[Unit, Unit]]:
    """Return a zoo's model's units that run without numbers, each measured so and with numbers."""
    family, _, function = name.partition(".")
    spec, without = resolve_model(f"{FOLDER / family}.py:{function}"), set[str]()
    see, large = measuring._see_without_numbers, (measuring._LONG_FLOP, measuring._LARGE_BYTES)

    def noted(empty: measuring.UnitModule, *given: Any) -> Any:
        found = see(empty, *given)
        without.update([] if found is None else [empty.name])
        return found

    try:
        measuring._see_without_numbers, measuring._LONG_FLOP = noted, 0.0
        graph = measuring.build_graph(spec, dtype=dtype)
        measuring._LONG_FLOP = measuring._LARGE_BYTES = math.inf
        return [
            both
            for both in zip(graph.units, measuring.build_graph(spec, dtype=dtype).units, strict=True)
            if both[0].name in without
        ]
    except ConfigError:
        return []  # such models are not trained
    finally:
        measuring._see_without_numbers, (measuring._LONG_FLOP, measuring._LARGE_BYTES) = see, large


def zoo_table(dtype: str) -> list[str]:
    """Compare all models of the zoo; return lines with how many units are the same, and the largest differences."""
    pairs = {name: found for name in names() if (found := compared(name, dtype))}
    units = [(f"{name} {one.name}", one, other) for name, found in pairs.items() for one, other in found]
    same = sum(one == other for _, one, other in units)
    table = [f"zoo, {dtype}: {len(units)} units ran without numbers, {same} are the same in all that is measured"]
    for what, value in KINDS.items():
        apart = sorted(
            ((value(one) / (value(other) or 1), where) for where, one, other in units if value(one) != value(other)),
            key=lambda row: -abs(row[0] - 1),
        )
        wholes = [sum(map(value, side)) for found in pairs.values() for side in zip(*found, strict=True)]
        most = max(abs(one / other - 1) for one, other in zip(wholes[::2], wholes[1::2], strict=True) if other)
        table.append(f"  {what}: {len(apart)} differ, of whole models by {100 * most:.1f} % at most")
        table += [f"    {100 * (ratio - 1):+.1f} % ({where})" for ratio, where in apart[:3]]
    return table


KINDS: dict[str, Callable[[Unit], float]] = {
    "held from F on": lambda unit: unit.activation_bytes_per_sample,
    "held from I on": lambda unit: unit.deferred_bytes_per_sample,
    "besides": lambda unit: unit.working_bytes + unit.working_bytes_per_sample,
}


def main() -> int:
    """Print the table; return 1 if the two ways do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, tokens, dtype, numbers = options.one
        print(json.dumps(measure(model, int(tokens), dtype, numbers)))
        return 0
    table = [
        f"{'model':<13} {'tokens':>6} {'dtype':<16} {'numbers':<8} {'CPU s':>7} {'memory':>9} {'a sample holds':>15}"
    ]
    rows, agree = list[dict[str, object]](), True
    with TemporaryDirectory() as folder:
        for model, tokens, dtype, both in CASES:
            held = set[float]()
            for numbers in (NONE, ALL)[: 1 + both]:
                one = measured(Path(folder), model, tokens, dtype, numbers)
                rows.append({"model": model, "tokens": tokens, "dtype": dtype, "numbers": numbers, **one})
                held.add(one["held_gib"])
                table.append(
                    f"{model:<13} {tokens:6} {dtype:<16} {numbers:<8} {one['processor_s']:7.1f} "
                    f"{one['most_gib']:5.2f} GiB {one['held_gib']:11.3f} GiB"
                )
                print(table[-1], file=sys.stderr)
            agree &= len(held) == 1
    table.append(f"what large models hold is the same both ways: {'yes' if agree else 'NO'}")
    for dtype in ("float32", "bfloat16"):
        table += zoo_table(dtype)
    print("\n".join(table))
    if options.save:
        results.save("model_graphs", table, {"results": rows})
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
