"""How large the house is: `scripts/structure.py [--json]`; fails where it grows past its bounds.

Lines and files of src/, the folder with the most modules beside each other, the longest group of modules in one folder
that share a prefix (a folder in disguise), names of classes that occur twice, and the longest module and function.
"""

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "spantrain"
WANTED_LINES = 78_000
"""What src/ should come down to (docs/decisions/0015-size-of-the-package.md)."""
BOUNDS = {
    "lines": 97_891,
    "files": 542,
    "fullest_folder": 15,
    "prefix_group": 3,
    "names_twice": 0,
    "longest_file": 400,
    "longest_function": 50,
}
"""The most of each; those of lines and files follow what is there, and are to come down to what is wanted."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Figures of the package, and where each of them lies."""

    lines: int
    files: int
    fullest_folder: int
    prefix_group: int
    names_twice: int
    longest_file: int
    longest_function: int
    where: dict[str, str]


def structure_of(source: Path) -> Structure:
    """Measure all modules under a folder."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    folders = Counter(path.parent for path in texts if path.name != "__init__.py")
    groups = Counter(
        (path.parent, prefix) for path in texts if (prefix := path.stem.partition("_")[0]) and path.stem[0] != "_"
    )
    homes: defaultdict[str, list[str]] = defaultdict(list)
    functions: Counter[str] = Counter()
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(str(path.relative_to(source)))
            elif isinstance(node, ast.FunctionDef) and node.end_lineno:
                functions[f"{path.relative_to(source)}:{node.name}"] = node.end_lineno - node.lineno + 1
    twice = {name: places for name, places in sorted(homes.items()) if len(places) > 1}
    sizes = Counter({path: text.count("\n") for path, text in texts.items()})
    (folder, in_folder), (group, in_group) = folders.most_common(1)[0], groups.most_common(1)[0]
    (file, in_file), (function, in_function) = sizes.most_common(1)[0], functions.most_common(1)[0]
    return Structure(
        lines=sum(sizes.values()),
        files=len(texts),
        fullest_folder=in_folder,
        prefix_group=in_group,
        names_twice=len(twice),
        longest_file=in_file,
        longest_function=in_function,
        where={
            "fullest_folder": str(folder.relative_to(source)),
            "prefix_group": f"{group[0].relative_to(source)}/{group[1]}*",
            "names_twice": "; ".join(f"{name}: {', '.join(places)}" for name, places in twice.items()),
            "longest_file": str(file.relative_to(source)),
            "longest_function": function,
        },
    )


def beyond(found: Structure) -> Iterator[str]:
    """A line for each figure past its bound."""
    for name, bound in BOUNDS.items():
        value = getattr(found, name)
        if value > bound:
            yield f"{name.replace('_', ' ')}: {value}, at most {bound}: {found.where.get(name, 'src/spantrain')}"


def main() -> int:
    """Print the figures; return 1 where one is past its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    arguments = parser.parse_args()
    found = structure_of(SOURCE)
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        for name, bound in BOUNDS.items():
            place = found.where.get(name, "")
            print(f"{name.replace('_', ' '):18} {getattr(found, name):6}  at most {bound:6}  {place[:90]}".rstrip())
        print(f"{'wanted lines':18} {WANTED_LINES:6}")
    wrong = list(beyond(found))
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
