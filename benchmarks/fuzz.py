"""Feed every reader of what others wrote with hostile input: it refuses, in bounded time and memory, and nothing else.

python benchmarks/fuzz.py [--cases 100000] [--target NAME[,NAME...]] [--seed N] [--first N] [--json FILE]

`make test` runs the same targets (`tests/fuzz/`) with 500 files or 1000 messages each; this is for the night. Each
target starts from valid messages or files and changes them. Nothing is emulated; nothing leaves the process. Exits with
1 if a case ended in anything but a value or a refusal, took too long or too much memory; `--target NAME --first NUMBER
--cases 1` makes one again.

slowest: processor time of the slowest case. memory: how much the process grew, at most, in fifty cases.
"""

import argparse
import json
import logging
import resource
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # where the targets are

from fuzz import file_targets, network_targets
from fuzz.target import Figures, Target, run_target

MOST_BYTES = 8 * 2**30
"""That the process may take: what would take more fails here, and not the machine."""
TARGETS: tuple[Target, ...] = (*network_targets.TARGETS, *file_targets.TARGETS)
HEAD = f"{'target':<44} {'cases':>8} {'refused':>8} {'accepted':>9} {'slowest':>10} {'memory':>10}"


def chosen(names: str | None) -> tuple[Target, ...]:
    """Return the targets of these names, or that begin so; all if none are given."""
    wanted = names.split(",") if names else [""]
    found = tuple(target for target in TARGETS if any(target.name.startswith(name) for name in wanted))
    return found or sys.exit(f"no target is named {names}; there are {', '.join(target.name for target in TARGETS)}")


def told(figures: Figures) -> str:
    """Return a row of the table."""
    return (
        f"{figures.name:<44} {figures.cases:>8} {figures.refused:>8} {figures.accepted:>9} "
        f"{1e3 * figures.slowest_s:>7.1f} ms {figures.most_bytes / 2**20:>6.1f} MiB"
    )


def main() -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable()  # what is refused is counted
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    rows = []
    print(HEAD)
    for target in chosen(options.target):
        rows.append(run_target(target, options.cases, options.seed, first=options.first))
        print(told(rows[-1]), *rows[-1].failures, sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
