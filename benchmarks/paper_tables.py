"""The papers' figures beside ours, simulated at full scale: `benchmarks/paper_tables.py [--only NAME...] [--json]`.

A table for every figure whose numbers the paper's text gives. Simulated are plans at full scale with event simulation;
the times are from data sheets (peak rates of the kinds with an analytic law) and from the networks that the papers
describe, not from measurements. Only Sailor's figures come from measured layers and links, those of its artifact
(--reference DIR; left out where there is no such folder). Nothing is emulated.

Verdicts: `within` the paper's range (10 % over its ends); `near` (up to 1.5 times from it), `off` (up to 3 times), or
`far`, with the factor; the `other winner`; `no number`: the paper's text has none; `faster`, `slower`: seconds of
search; `no answer`: the strategy is missing or refuses (the note says why).

`--write` puts the tables into docs/paper-tables.md and what they were made from beside it; `--check` says whether the
page is older than the code: where a digest of the code differs, some answers of every contender are asked again.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from made_from import digest_of
from paper_asteroid import ASTEROID_TABLES
from paper_asteroid_cases import ASTEROID
from paper_page import check_page, write_page
from paper_rows import PaperTable, Recorded, paper_range, verdict
from paper_sailor import SAILOR_TABLES
from paper_spantrain import SPANTRAIN_TABLES
from paper_spantrain_cases import SPANTRAIN
from worker_pool import follow_parent

NAMES = (*SPANTRAIN_TABLES, *ASTEROID_TABLES, *SAILOR_TABLES)
ALONE = ("spantrain-13", "spantrain-zh-8")
"""Tables whose answers no other needs."""
VERDICTS = (*("within", "near", "off", "far", "other winner"), *("faster", "slower", "no number", "no answer"))
DATA = (
    "Simulated with events at full scale. Times of work: data sheets' peak rates with an analytic law; networks: as "
    "the papers describe them, latencies assumed. Sailor's tables: layers and links that its artifact measured."
)
Made = tuple[list[PaperTable | str], list[Recorded]]
"""Tables, or why one is left out, and the answers that they are made of."""


def page_of(table: PaperTable) -> dict[str, object]:
    """Return a table for JSON."""
    rows = [{**asdict(row), "verdict": verdict(row)} for row in table.rows]
    return {**asdict(table), "rows": rows}


def tables_of(names: Sequence[str], reference: Path | None) -> Made:
    """Return tables, one after the other, so that they share answers."""
    found: list[PaperTable | str] = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        started_s, processor_s = time.perf_counter(), time.process_time()
        table = (
            SAILOR_TABLES[name](reference) if name in SAILOR_TABLES else {**SPANTRAIN_TABLES, **ASTEROID_TABLES}[name]()
        )
        if isinstance(table, str):
            found.append(f"{name}: {table}")
            continue
        seconds, processor_s = time.perf_counter() - started_s, time.process_time() - processor_s
        found.append(replace(table, seconds=seconds, processor_s=processor_s))
    own = {name.partition("-")[0] for name in names}
    return found, [entry for contests in (SPANTRAIN, ASTEROID) if contests.name in own for entry in contests.recorded()]


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """Return the names in groups that share answers."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name if name in ALONE else name.partition("-")[0], []).append(name)
    return list(found.values())


def chosen_names(only: Sequence[str]) -> list[str]:
    """Return the tables whose names begin with any of these words; all, if there are none."""
    return [name for name in NAMES if not only or name.startswith(tuple(only))]


def counts_text(tables: Sequence[PaperTable]) -> str:
    """Return how often each verdict was given, and the rows that are far from the paper's or have another winner."""
    counts = sum((table.counts() for table in tables), Counter[str]())
    plain = sum((table.counts() for table in tables if not table.name.endswith("-why")), Counter[str]())
    lines = [
        f"All: {_listed(counts)}.",
        f"Without the -why tables, whose assumptions were chosen to fit: {_listed(plain)}.",
        "Those that are far, or have another winner, and their notes:",
    ]
    for table in tables:
        for row in table.rows:
            said = verdict(row)
            if said.startswith(("far", "other winner", "slower")):
                lines.append(
                    f"  {table.name}: {row.what}: {paper_range(row.paper)}, ours {row.ours:.3g}: {said} ({row.note})"
                )
    return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in VERDICTS)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"beginnings of {', '.join(NAMES)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--reference", type=Path, default=None, metavar="DIR", help="figures of the Sailor artifact")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the page; takes all tables and --reference")
    parser.add_argument("--check", action="store_true", help="say whether the page is older than the code")
    options = parser.parse_args()
    if options.check:
        return check_page()
    chosen = chosen_names(options.only)
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: no such table; there are {', '.join(NAMES)}")
    if options.write and (options.only or options.reference is None):
        parser.error("--write takes all tables: give --reference, and no --only")
    code = digest_of(Path(__file__))
    tables: list[PaperTable] = []
    answers: list[Recorded] = []
    with multiprocessing.get_context("spawn").Pool(options.processes, initializer=follow_parent) as pool:
        for group, asked in pool.imap(partial(tables_of, reference=options.reference), groups_of(chosen)):
            answers += asked
            for table in group:
                if isinstance(table, str):
                    print(f"left out: {table}", file=sys.stderr)
                    continue
                tables.append(table)
                if not options.json:
                    print(table.text(), end="\n\n", flush=True)
    if options.json:
        counts = sum((table.counts() for table in tables), Counter[str]())
        print(json.dumps({"data": DATA, "tables": [page_of(table) for table in tables], "counts": counts}, indent=1))
    else:
        print(f"{counts_text(tables)}\n{DATA}")
    if options.write:
        write_page(tables, counts_text(tables), answers, code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
