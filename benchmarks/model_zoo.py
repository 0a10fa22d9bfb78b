"""Models as people bring them, against plain PyTorch: `benchmarks/model_zoo.py [--only NAME] [--compiled] [--json]`.

Each is returned by a function, unedited, with random weights and four layers or more (`tests/testing/models/zoo`). It
is cut into units, planned over two to four devices with a profile by data sheets, and trained for three steps of SGD in
a stage for each device and several micro-batches; losses and gradients of all parameters are compared with those of one
process in plain PyTorch, in training mode with the same draws. Real: cutting, planning, computation. There are no
processes, no network, and no times. Without `--only` the results are written, and the table in docs/models.md is made
anew.
"""

import argparse
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from results import save  # noqa: E402
from testing.models.zoo.trial import EQUAL, Trial, names, tried  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- from here on written by model_zoo.py -->", "<!-- up to here -->"
FEWEST, KINDS = 2, 3
"""Numbers of devices: two, three and four, in turn."""


def result_of(trial: Trial) -> str:
    """Return what came of a model, in words."""
    if trial.crashed:
        return f"crash: {trial.crashed}"
    if trial.refused:
        return "refused: " + re.sub(r"\S*(/site-packages|/tests)/", "", trial.refused.partition(": ")[2])
    return f"{'equal' if trial.error <= EQUAL else 'DIFFERS'}, {trial.error:.0e}"


def lines(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield a table for a terminal."""
    yield f"{'model':42} {'units':>5} {'stages':>6}  losses and gradients: largest relative error"
    for trial in trials:
        yield f"{trial.name:42} {trial.units or '':>5} {trial.stages or '':>6}  {result_of(trial)}"
    equal = sum(is_equal(trial) for trial in trials)
    refused = sum(bool(trial.refused) for trial in trials)
    yield f"{len(trials)} models: {equal} equal, {refused} refused, {len(trials) - equal - refused} wrong"
    if compiled := [trial.error for trial in trials if trial.compiled]:
        yield f"{len(compiled)} of them with layers that are compiled, errors up to {max(compiled):.0e}"


def is_equal(trial: Trial) -> bool:
    """Whether it was trained as plain PyTorch does it."""
    return not trial.refused and not trial.crashed and trial.error <= EQUAL


def write_page(trials: Iterable[Trial]) -> None:
    """Make the table in docs/models.md anew."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} has no {BEGIN}"
    assert end, f"{PAGE} has no {END}"
    rows = ["| model | class | units | stages | result |", "|---|---|---|---|---|"]
    rows += [
        f"| {one.name} | {one.class_name} | {one.units or ''} | {one.stages or ''} | {_short(result_of(one))} |"
        for one in trials
    ]
    PAGE.write_text("\n".join((f"{before}{begin}", "", *rows, "", f"{end}{after}")), encoding="utf-8")


def _anywhere(trial: Trial) -> Trial:
    """Name files as in the repository, wherever that lies."""
    return replace(trial, refused=trial.refused.replace(f"{ROOT}/", ""))


def _short(text: str, most: int = 110) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def main() -> int:
    """Try the models, print the table; return 1 if any crashed, or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="models with this in their name; nothing is written")
    parser.add_argument("--compiled", action="store_true", help="layers cut as for torch.compile; nothing is written")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    chosen = [(number, name) for number, name in enumerate(names()) if (options.only or "") in name]
    trials = [
        _anywhere(tried(name, devices=FEWEST + number % KINDS, compiled=options.compiled)) for number, name in chosen
    ]
    table = list(lines(trials))
    print(json.dumps([asdict(trial) for trial in trials], indent=1) if options.json else "\n".join(table))
    if options.only is None and not options.compiled:
        save("model_zoo", table, {"models": [asdict(trial) for trial in trials]})
        write_page(trials)
    return 0 if all(trial.refused or is_equal(trial) for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
