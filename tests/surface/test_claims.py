"""Pages that name tests for what they say: each test is there, and each section has some."""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADING = "Tests of what this page says"
PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md") if f"\n## {HEADING}\n" in page.read_text("utf-8"))
ADVICE = {"security.md": {"What is left to you"}}
"""Sections that make no claims about the program."""
SECTION = re.compile(r"\| \*\*(.+)\*\* \| \|")
CLAIM = re.compile(r"\| (?!\*\*)(.+) \| (`tests/[^|]+`) \|")
TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)+)`")


def text_and_table(page: str) -> tuple[str, list[str]]:
    """The page before its table, and the table's rows."""
    text, _, table = (ROOT / "docs" / page).read_text("utf-8").partition(f"\n## {HEADING}\n")
    head, _, *rows = table.strip().splitlines()
    assert head == "| claim | test |"
    return text, rows


@cache
def names_in(path: str) -> frozenset[str]:
    """`::test` and `::Class::test` of a file."""
    found = set()
    for node in ast.parse((ROOT / path).read_text("utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        found |= {f"::{node.name}::{one.name}" for one in inner if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.FunctionDef):
            found.add(f"::{node.name}")
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_the_pages_on_security_protocol_and_running_have_such_a_table():
    assert {"security.md", "wire-protocol.md", "running.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_each_claim_names_tests_that_are_there(page):
    for row in text_and_table(page)[1]:
        claim = CLAIM.fullmatch(row)
        assert claim or SECTION.fullmatch(row), f"neither a section nor a claim with its tests: {row}"
        for named in claim[2].split("<br>") if claim else ():
            test = TEST.fullmatch(named)
            assert test, named
            assert (ROOT / test[1]).is_file(), named
            assert test[2] in names_in(test[1]), f"{claim[1]}: there is no {named}"


@pytest.mark.parametrize("page", PAGES)
def test_each_section_has_claims_in_the_pages_order(page):
    text, rows = text_and_table(page)
    title = text.partition("\n")[0].removeprefix("# ")
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    wanted = [one for one in headings if one not in ADVICE.get(page, set())]
    found = [(k, match[1]) for k, row in enumerate(rows) if (match := SECTION.fullmatch(row))]
    assert [name for _, name in found if name != title] == wanted
    assert found[0][0] == 0
    begins = [k for k, _ in found] + [len(rows)]
    assert all(end - begin > 1 for begin, end in pairwise(begins)), "a section without a claim"
