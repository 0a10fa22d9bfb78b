"""docs/paper-tables.md: the tables written into it, what they were made from beside it, and whether they still hold."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from made_from import digest_of
from paper_asteroid_cases import ASTEROID, Boards
from paper_rows import Answer, PaperTable, Recorded
from paper_spantrain_cases import SPANTRAIN, Case

SCRIPT = Path(__file__).with_name("paper_tables.py")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "paper-tables.md"
RECORD = PAGE.with_suffix(".json")
COMMAND = "python benchmarks/paper_tables.py --write --reference DIR"
BEGIN, END = "<!-- from here on written by paper_tables.py -->", "<!-- up to here -->"
PAPERS = {"spantrain": "SpanTrain", "asteroid": "Asteroid", "sailor": "Sailor"}
CONTESTS = {"spantrain": (SPANTRAIN, Case), "asteroid": (ASTEROID, Boards)}
CHEAP_S = 1.0
"""Seconds of the processor up to which any answer of a contender may be asked again; of a slower one its quickest."""
SAME = 2e-3
"""Relative difference of answers that count as the same."""


def write_page(tables: Sequence[PaperTable], counts: str, answers: Iterable[Recorded], code: str) -> None:
    """Put tables into the page, and what they were made from beside it: code with this digest."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    made = f"Made {datetime.now(UTC):%Y-%m-%d} by `{COMMAND}` of the code with the digest `{code}`."
    parts = [BEGIN, made, "## Counts", f"```\n{counts}\n```"]
    for prefix, title in PAPERS.items():
        parts += [f"## {title}", *(f"```\n{table.text()}\n```" for table in tables if table.name.startswith(prefix))]
    block = "\n\n".join((*parts, END))
    PAGE.write_text(before + block + rest.partition(END)[2], encoding="utf-8")
    distinct = {_key(entry): entry for entry in map(asdict, answers)}
    rows = ",\n".join(json.dumps(distinct[key]) for key in sorted(distinct))
    head = json.dumps({"script": SCRIPT.name, "code": code, "page": _sha256(block)})
    RECORD.write_text(f'{head[:-1]}, "answers": [\n{rows}\n]}}\n', encoding="utf-8")
    print(f"written: {PAGE}, {RECORD.name}", file=sys.stderr)


def check_page() -> int:
    """Return 0 if the page shows what the code comes to, as far as was asked; else say what differs, and return 1."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    _, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    block, end, _ = rest.partition(END)
    if _sha256(begin + block + end) != record["page"]:
        print(f"docs/{PAGE.name} is not what was written with docs/{RECORD.name}; run: {COMMAND}", file=sys.stderr)
        return 1
    code = digest_of(SCRIPT)
    if code == record["code"]:
        print(f"docs/{PAGE.name} is of this code")
        return 0
    asked = list(sample(record["answers"], code))
    stale = [line for entry in asked if (line := _differs(entry)) is not None]
    if stale:
        print(
            f"docs/{PAGE.name} is older than the code that it shows; run: {COMMAND}",
            *stale,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    print(f"docs/{PAGE.name} is of other code; {len(asked)} of its answers were asked again and are the same")
    return 0


def sample(answers: Sequence[dict[str, Any]], code: str) -> Iterator[dict[str, Any]]:
    """Yield an answer of each contender: another one for other code, and of the slow ones the quickest."""
    by_contender: dict[str, list[dict[str, Any]]] = {}
    for entry in answers:
        by_contender.setdefault(entry["contender"], []).append(entry)
    for entries in by_contender.values():
        cheap = [entry for entry in entries if entry["seconds"] <= CHEAP_S]
        cheap = cheap or [min(entries, key=lambda entry: float(entry["seconds"]))]
        yield min(cheap, key=lambda entry: _sha256(code + _key(entry)))


def _differs(entry: dict[str, Any]) -> str | None:
    """Ask an answer again; return what is different, if anything is."""
    contests, case = CONTESTS[entry["of"]]
    found: Answer = contests(case(**entry["case"])).answer(entry["contender"])
    said, now = entry["samples_per_s"], found.samples_per_s
    if said == now or (said and now and abs(said / now - 1) <= SAME):
        return None
    shown = ", ".join(f"{name} {value}" for name, value in entry["case"].items() if value)
    return f"{shown}: {entry['contender']}: {said} samples/s there, {now} now"


def _key(entry: dict[str, Any]) -> str:
    return json.dumps([entry["of"], entry["case"], entry["contender"]])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
