"""The papers' figures beside ours, simulated at full scale: `benchmarks/paper_tables.py [--only NAME...] [--json]`.

A table for every figure whose numbers the paper's text gives. Simulated are plans at full scale with event simulation;
the times are from data sheets (peak rates of the kinds with an analytic law) and from the networks that the papers
describe, not from measurements. Only Sailor's figures come from measured layers and links, those of its artifact
(--reference DIR; left out where there is no such folder). Nothing is emulated.

Verdicts: `within` the paper's range (10 % over its ends), the `same winner`, or it `differs`; `no number`: the paper's
text has none; `faster`, `slower`: seconds of search; `no answer`: the strategy is missing or refuses (the note says
why).
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

from paper_asteroid import ASTEROID_TABLES
from paper_rows import PaperTable, paper_range, verdict
from paper_sailor import SAILOR_TABLES
from paper_spantrain import SPANTRAIN_TABLES
from worker_pool import follow_parent

NAMES = (*SPANTRAIN_TABLES, *ASTEROID_TABLES, *SAILOR_TABLES)
ALONE = ("spantrain-13", "spantrain-zh-8")
"""Tables whose answers no other needs."""
VERDICTS = ("within", "same winner", "differs", "faster", "slower", "no number", "no answer")
DATA = (
    "Simulated with events at full scale. Times of work: data sheets' peak rates with an analytic law; networks: as "
    "the papers describe them, latencies assumed. Sailor's tables: layers and links that its artifact measured."
)


def page_of(table: PaperTable) -> dict[str, object]:
    """Return a table for JSON."""
    rows = [{**asdict(row), "verdict": verdict(row)} for row in table.rows]
    return {**asdict(table), "rows": rows}


def tables_of(names: Sequence[str], reference: Path | None) -> list[PaperTable | str]:
    """Return tables, or why one is left out, one after the other, so that they share answers."""
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
    return found


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """Return the names in groups that share answers."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name if name in ALONE else name.partition("-")[0], []).append(name)
    return list(found.values())


def chosen_names(only: Sequence[str]) -> list[str]:
    """Return the tables whose names begin with any of these words; all, if there are none."""
    return [name for name in NAMES if not only or name.startswith(tuple(only))]


def show_end(tables: Sequence[PaperTable], *, as_json: bool) -> None:
    """Print the counts, and which rows differ; as JSON, everything."""
    counts = sum((table.counts() for table in tables), Counter[str]())
    if as_json:
        print(json.dumps({"data": DATA, "tables": [page_of(table) for table in tables], "counts": counts}, indent=1))
        return
    plain = sum((table.counts() for table in tables if not table.name.endswith("-why")), Counter[str]())
    print(f"All: {_listed(counts)}.\nWithout the -why tables, whose assumptions were chosen to fit: {_listed(plain)}.")
    print("Those that differ, and their notes:")
    for table in tables:
        for row in table.rows:
            if verdict(row) in ("differs", "slower"):
                found = "-" if row.ours is None else f"{row.ours:.3g}"
                print(f"  {table.name}: {row.what}: {paper_range(row.paper)}, ours {found} ({row.note})")
    print(DATA)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in VERDICTS)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"beginnings of {', '.join(NAMES)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--reference", type=Path, default=None, metavar="DIR", help="figures of the Sailor artifact")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    chosen = chosen_names(options.only)
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: no such table; there are {', '.join(NAMES)}")
    tables: list[PaperTable] = []
    with multiprocessing.get_context("spawn").Pool(options.processes, initializer=follow_parent) as pool:
        for group in pool.imap(partial(tables_of, reference=options.reference), groups_of(chosen)):
            for table in group:
                if isinstance(table, str):
                    print(f"left out: {table}", file=sys.stderr)
                    continue
                tables.append(table)
                if not options.json:
                    print(table.text(), end="\n\n", flush=True)
    show_end(tables, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
