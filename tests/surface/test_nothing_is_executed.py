"""What files and networks bring is read, never run: none of the calls that would run it stands in the program."""

import ast
from collections.abc import Iterator
from pathlib import Path

import spantrain

CALLS = frozenset(
    ("eval", "exec", "compile", "__import__", "os.system", "marshal.loads", "shelve.open", "joblib.load", "np.load")
) | {"numpy.load", "pickle.load", "pickle.loads", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
PICKLING = frozenset(
    f"{verb}_object{more}" for verb in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for more in ("", "_list")
)  # fmt: skip
"""What torch.distributed sends pickled."""
IMPORTING = (
    "__init__.py", "app/training/trackers.py", "devices/registry.py", "models/adapters.py", "models/sources.py",
    "models/tracing/factory.py", "plugins.py",
)  # fmt: skip
"""Where modules are imported by name: the package's own, and users' functions, which the command line names."""


def name_of(call: ast.expr) -> str:
    if isinstance(call, ast.Attribute):
        return f"{name_of(call.value)}.{call.attr}"
    return call.id if isinstance(call, ast.Name) else ""


def calls(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield name_of(node.func), node.lineno
            if any(key.arg == "shell" for key in node.keywords):
                yield "shell=", node.lineno
            if any(key.arg == "trust_remote_code" for key in node.keywords):
                yield "trust_remote_code=", node.lineno


def test_nothing_that_was_read_is_run():
    root = Path(spantrain.__path__[0])
    found = [(path, name, line) for path in sorted(root.rglob("*.py")) for name, line in calls(path)]
    wrong = [entry for entry in found if entry[1] in CALLS or entry[1].endswith("=")]
    assert wrong == []
    assert [entry for entry in found if entry[1].rpartition(".")[2] in PICKLING] == []
    importing = {path.relative_to(root).as_posix() for path, name, _ in found if name.startswith("importlib.")}
    assert importing == set(IMPORTING)
