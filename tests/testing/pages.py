"""What pages show of the program: commands with their output, and commands alone."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_UNIT = r"(?: ?(?:[µm]?s|[KMG]iB|[kMG]?B|[kMGT]?bit/s|[KMG]iB/s|[GT]FLOP/s|samples/s|tokens/s|%)(?![\w/]))?"
_NUMBER = re.compile(rf"[+-]?\d[\d,]*(?:[.:]\d+)*(?:e[+-]?\d+)?{_UNIT}")


@dataclass(frozen=True)
class Shown:
    """A command of a page, and what the page says that it prints."""

    line: int
    command: str
    output: str


def shown_in(text: str, heading: str = "") -> Iterator[Shown]:
    """Yield the commands behind `$ ` in blocks of `console`, of one section or of all."""
    begin = text.index(f"\n## {heading}\n") if heading else 0
    end = text.find("\n## ", begin + 1) if heading else -1
    for block in _BLOCK.finditer(text, begin, end if end > 0 else len(text)):
        if block[1] != "console":
            continue
        line = text.count("\n", 0, block.start(2))
        for part in re.split(r"^\$ ", block[2], flags=re.MULTILINE)[1:]:
            command, _, output = part.replace("\\\n", "\\\0").partition("\n")
            yield Shown(line, command.replace("\\\0", " "), output)


def difference(wanted: str, found: str) -> str:
    """Return what to say where an output is not as a page has it; nothing where it is.

    Numbers with their units may differ, and with them how wide tables are; `...` stands for any part of a line, alone
    on a line for any lines.
    """
    lines = [re.escape(_plain(line)).replace(r"\.\.\.", ".*") + "\n" for line in wanted.splitlines()]
    pattern = "".join("(?:.*\n)*?" if line == ".*\n" else line for line in lines)
    if re.fullmatch(pattern, "".join(f"{_plain(line)}\n" for line in found.splitlines())):
        return ""
    return f"the page has:\n{wanted}\nthe program printed:\n{found}"


def _plain(line: str) -> str:
    return re.sub(r"[ ─━═]+", " ", _NUMBER.sub("#", line)).strip()


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each `spantrain ...` that stands in a block, or between backticks."""
    blocks = [block[2] for block in _BLOCK.finditer(text)]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            yield from _words(line)
    for inline in re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text)):
        yield from _words(inline)


def _words(line: str) -> Iterator[list[str]]:
    found = re.match(r"(?:\w*\$ )?(?:\w+=\S+ )*(?:.* --no-python )?spantrain (.*)", line.strip())
    if found:
        yield re.sub(r"(?:^| )# .*|[;|>].*", "", found[1]).split()
