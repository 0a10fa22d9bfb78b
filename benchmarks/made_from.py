"""What code figures were made from, as a digest; and which are older: `benchmarks/made_from.py [--check] [JSON...]`.

A digest is of all modules that a script imports when it starts, its own and the package's, and of the package's data
(presets, kinds, graphs, prices). What other processes run that the script starts does not count. It stands as `code`,
beside the name of the script, in the JSON that belongs to the figures.
"""

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "benchmarks"
FOLDERS = (ROOT / "src", SCRIPTS, ROOT / "tests")
RECORDS = (SCRIPTS / "results", ROOT / "docs")
DATA = tuple(ROOT / "src" / "spantrain" / layer for layer in ("config", "cost"))


def digest_of(script: Path) -> str:
    """Return the digest of what a script's figures depend on."""
    data = (path for folder in DATA for path in folder.rglob("*") if path.suffix in (".yaml", ".json"))
    found = hashlib.sha256()
    for path in sorted({*_modules(script), *data}):
        found.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def _modules(script: Path) -> set[Path]:
    """Return the script and all modules of ours that it imports when it starts, and they."""
    found: set[Path] = set()
    waiting = [script.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [module for name in _imported(path) if (module := _module(name)) is not None]
    return found


def _imported(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(name: str) -> Path | None:
    for folder in FOLDERS:
        path = folder.joinpath(*name.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.exists():
                return candidate
    return None


def state_of(record: Path) -> tuple[bool, str]:
    """Return whether the JSON beside figures, with its `script` and `code`, is of today's code; and that in words."""
    about = json.loads(record.read_text(encoding="utf-8"))
    if not {"script", "code"} <= about.keys():
        return False, "made before digests were kept"
    script = SCRIPTS / str(about["script"])
    if not script.is_file():
        return False, f"{script.name} is no more"
    if about["code"] != digest_of(script):
        return False, f"older than the code of {script.name}"
    return True, f"of this code, as far as {script.name} imports it"


def main() -> int:
    """Print which figures are older than their code; with `--check` return 1 if any that is named is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", nargs="*", type=Path, metavar="JSON", help="all of benchmarks/results and docs")
    parser.add_argument("--check", action="store_true", help="exit with 1 if any is older")
    options = parser.parse_args()
    states = []
    for record in options.records or sorted(path for folder in RECORDS for path in folder.glob("*.json")):
        states.append(state_of(record))
        print(f"{record.stem}: {states[-1][1]}")
    return 1 if options.check and not all(fresh for fresh, _ in states) else 0


if __name__ == "__main__":
    sys.exit(main())
