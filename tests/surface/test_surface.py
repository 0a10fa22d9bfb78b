"""What the package promises by name: its modules, their maps, a quick start, and the keys of its JSON."""

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import spantrain
from testing.patience import PATIENCE_S

MODULES = sorted(
    {module.name for module in pkgutil.walk_packages(spantrain.__path__, "spantrain.")} - {"spantrain.__main__"}
)
PACKAGES = [name for name in MODULES if hasattr(importlib.import_module(name), "__path__")]


def test_what_the_package_offers_is_listed_and_explained():
    """Classes and functions that users import have a docstring; the list is sorted and true."""
    assert list(spantrain.__all__) == sorted(spantrain.__all__)
    for name in set(spantrain.__all__) - {"__version__"}:
        value = getattr(spantrain, name)
        assert value.__doc__, name
        assert name in importlib.import_module(value.__module__).__dict__


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name):
    assert (importlib.import_module(name).__doc__ or "").strip()


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "spantrain"])
def test_a_package_says_what_is_in_it_and_how_to_add_to_it(name):
    """And holds nothing else in a file of its own."""
    package = importlib.import_module(name)
    assert "Not here: " in (package.__doc__ or "")
    assert "import " not in Path(str(package.__file__)).read_text().replace(package.__doc__ or "", "")


def test_command_line_starts_without_torch():
    code = (
        "import sys, spantrain.cli.main as program\n"
        "for words in (['--help'], ['drain', '/none', 'a'], ['testbed', 'kill', '/none', 'a'], ['why', '/none']):\n"
        "    try:\n        program.main(words)\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'grpc', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    for command in ("demo", "profile", "groups", "plan", "train", "worker", "testbed"):
        assert command in ended.stdout


def test_planning_needs_no_torch():
    """The layers that decide run where torch is not installed."""
    decide = ("spantrain.core", "spantrain.config", "spantrain.cost", "spantrain.schedule", "spantrain.adaptation",
              "spantrain.planner", "spantrain.sim", "spantrain.formats")  # fmt: skip
    names = [name for name in MODULES if name.startswith(decide)]
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_json_of_planning_and_training(tmp_path, law_profile):
    """With --json, standard output holds one JSON object with the promised keys, and nothing else."""
    profile = written_profile(tmp_path, law_profile)
    groups = one_object("groups", profile, "--json")
    assert groups
    plan = one_object("plan", profile, "--global-batch", 8, "--out", tmp_path / "plan.json", "--json")
    assert {
        "plan", "search_s", "step_s_predicted", "samples_per_s_predicted", "peak_bytes", "best_single_device",
        "best_single_site", "reasons",
    } <= plan.keys()  # fmt: skip
    assert plan["plan"]["stages"]
    assert set(plan["peak_bytes"]) == {
        device for stage in plan["plan"]["stages"] for replica in stage["replicas"] for device in replica["devices"]
    }
    train = one_object(
        "train", tmp_path / "plan.json", "--steps", 3, "--no-network", "--out", tmp_path / "run", "--json",
        "--report-to", "tensorboard",
    )  # fmt: skip
    assert {
        "losses", "step_s_measured", "step_s_predicted", "samples_per_s", "devices", "links", "generation", "trace",
    } <= train.keys()  # fmt: skip
    assert len(train["losses"]) == 3
    assert all({"utilisation", "bubble_ratio"} <= figures.keys() for figures in train["devices"].values())
    assert all({"bytes_sent", "bytes_received"} <= figures.keys() for figures in train["links"].values())
    assert json.loads(Path(train["trace"]).read_text())["traceEvents"]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def written_profile(folder: Path, law_profile) -> Path:
    """Two emulated boards at two places, fast enough for a test."""
    from spantrain.config.artefacts import write_profile
    from spantrain.config.cluster_file import parse_cluster
    from spantrain.models.catalog.catalog import resolve_model

    cluster = parse_cluster(
        """\
name: two
sites:
  - name: a
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: a, backend: emulated, devices: {xavier-nx: 1}}
  - name: b
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: b, backend: emulated, devices: {xavier-nx: 1}}
links:
  - {between: [a, b], bandwidth: 100 Mbit/s, latency: 1 ms}
emulated_speed: 0.01
""",
        source="test",
    )
    path = folder / "profile.json"
    write_profile(law_profile(cluster, resolve_model("gpt2-tiny")), path)
    return path


def one_object(*words: object) -> dict[str, object]:
    """Run the program; return the one JSON object on its standard output."""
    ended = subprocess.run(
        [sys.executable, "-m", "spantrain", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts"])
def test_what_is_run_by_hand_imports_what_is_there(folder):
    """Nobody type-checks these, and some are run once in a month."""
    missing = []
    for path in sorted((Path(__file__).parents[2] / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "spantrain":
                module = importlib.import_module(str(node.module))
                for name in (one.name for one in node.names if not hasattr(module, one.name)):
                    try:
                        importlib.import_module(f"{node.module}.{name}")
                    except ModuleNotFoundError:
                        missing.append(f"{path.name}: {node.module}.{name}")
    assert not missing
