"""Classes of transformers on rows, against plain PyTorch: `benchmarks/library_classes.py [--part K/N] [--only NAME]`.

Of every class in the library's tables for text, answers, pairs, pictures and sounds, a small model is made by sizes
that suit most (`library_sizes.py`), saved, and named `hf:FOLDER` with rows, as `Trainer("hf:FOLDER", data=rows)` does.
It is cut, checked, planned over two to four devices, and one step of it trained in a stage for each, the second
micro-batch's backward in halves; losses and gradients of all parameters are compared with those of one process in plain
PyTorch, in training mode with the same draws, and the folder's weights are found again. Each has a process of its own.
`not made`: the library could not make a model of these sizes, or it is larger than 20 million parameters; which says
nothing of it here. Real: cutting, planning, computation. There are no network and no times. `--part K/N` tries every
N-th class from the K-th on; `--only NAME` writes nothing.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from results import save  # noqa: E402

MOST_PARAMETERS, MOST_S = 20_000_000, 180
FEWEST, KINDS = 2, 3
"""Numbers of devices: two, three and four, by the length of a class's name."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of a class."""

    name: str
    task: str
    result: str
    """`equal`, `refused`, `not made`, or what is wrong: `differs`, `other weights`, `crash`."""
    told: str = ""
    error: float = 0.0
    """The largest relative one, of the loss and of all parameters' gradients."""
    units: int = 0
    stages: int = 0


def tried(name: str, task: str) -> Found:
    """Try a class in this process."""
    from library_sizes import small_model

    found = Found(name=name, task=task, result="not made")
    try:
        model, batch = small_model(name, task)
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > MOST_PARAMETERS:
            return replace(found, told=f"{size} parameters")
        model.train()(**batch).loss.backward()
    except Exception as error:  # noqa: BLE001 - of the library's
        return replace(found, told=f"{type(error).__name__}: {str(error)[:120]}")
    from spantrain.errors import ConfigError

    try:
        with tempfile.TemporaryDirectory() as folder:
            return _compared(found, model, batch, folder)
    except ConfigError as error:
        return replace(found, result="refused", told=str(error).partition(": ")[2])
    except Exception as error:  # noqa: BLE001 - what it crashes with is what is asked
        return replace(found, result="crash", told=f"{type(error).__name__}: {str(error)[:200]}")


def _compared(found: Found, model, batch, folder: str) -> Found:  # type: ignore[no-untyped-def]
    import torch

    from spantrain.app.weight_folder import find_weights
    from spantrain.models.data.choice import model_on_data
    from spantrain.models.graph import build_graph
    from spantrain.models.tracing.model import cut_model
    from spantrain.models.tracing.source import load_model
    from testing.models.zoo import trial

    trial.STEPS = 1
    model.save_pretrained(folder)
    spec = model_on_data(f"hf:{folder}", sample={key: tensor[0] for key, tensor in batch.items()})
    graph = build_graph(spec)
    plan = trial.planned(spec, graph, FEWEST + len(found.name) % KINDS)
    whole = replace(load_model(spec, seed=0), trains=cut_model(spec).whole.trains)
    error = trial.largest_error(spec, graph, plan, whole)
    weights, own = find_weights(Path(folder), spec).read(), dict(model.named_parameters(remove_duplicate=False))
    result = "equal" if error <= trial.EQUAL else "differs"
    if not all(torch.equal(weight, own[key].detach()) for key, weight in weights.items()):
        result = "other weights"
    return replace(found, result=result, error=error, units=len(graph.units), stages=len(plan.stages))


def _apart(one: tuple[str, str]) -> Found:
    """Try a class in a process of its own."""
    found = Found(name=one[0], task=one[1], result="crash", told=f"its process ended, or took over {MOST_S} s")
    command = [sys.executable, __file__, "--one", *one]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_S)
        return Found(**json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return found


def lines(found: Sequence[Found]) -> Iterator[str]:
    """Yield what came of all, by what they learn, and each that is not equal."""
    kinds = ("equal", "refused", "wrong", "not made")
    counts: Counter[tuple[str, str]] = Counter()
    for one in found:
        counts[one.task, one.result if one.result in kinds else "wrong"] += 1
    yield f"{'what is learnt':26}" + "".join(f"{kind:>10}" for kind in kinds)
    for task in dict.fromkeys(one.task for one in found):
        yield f"{task.lower():26}" + "".join(f"{counts[task, kind]:10}" for kind in kinds)
    sums = {kind: sum(counts[task, kind] for task in {one.task for one in found}) for kind in kinds}
    yield f"{'all':26}" + "".join(f"{sums[kind]:10}" for kind in kinds)
    largest = max((one.error for one in found if one.result == "equal"), default=0.0)
    yield f"largest relative error of those that are equal: {largest:.0e}"
    for one in found:
        if one.result not in ("equal", "not made"):
            yield f"{one.name}: {one.result}: {one.told or f'{one.error:.1e}'}"


def main() -> int:
    """Try the classes, print the table; return 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th class from the K-th on")
    parser.add_argument("--only", metavar="NAME", help="classes with this in their name; nothing is written")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if options.one:
        print(json.dumps(asdict(tried(*options.one))))
        return 0
    from library_sizes import classes

    first, every = map(int, options.part.split("/"))
    chosen = [one for one in classes()[first - 1 :: every] if (options.only or "") in one[0]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = []
        for one in pool.map(_apart, chosen):
            found.append(one)
            print(f"{len(found)}/{len(chosen)} {one.name}: {one.result}", file=sys.stderr, flush=True)
    table = list(lines(found))
    print(json.dumps([asdict(one) for one in found], indent=1) if options.json else "\n".join(table))
    if options.only is None:
        save("library_classes", table, {"part": options.part, "classes": [asdict(one) for one in found]})
    return int(any(one.result not in ("equal", "refused", "not made") for one in found))


if __name__ == "__main__":
    sys.exit(main())
