"""Print what it takes to measure what large models hold: without numbers, as by default, and with them.

python benchmarks/model_graphs.py [--save]

Every run is a process of its own, so that its most memory is its own. Runs with numbers that would take much longer
than a minute are left out. Nothing is emulated: `build_graph` is what every plan begins with where the model is not in
the catalogue. What both say a sample holds is compared.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import results
from spantrain.models import graph as measuring
from spantrain.models.catalog.catalog import resolve_model

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
            agree &= max(held) <= 1.001 * min(held)
    table.append(f"both ways say the same, to 0.1 %: {'yes' if agree else 'NO'}")
    print("\n".join(table))
    if options.save:
        results.save("model_graphs", table, {"results": rows})
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
