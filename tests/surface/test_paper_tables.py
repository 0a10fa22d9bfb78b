"""The page of the papers' tables shows what the code comes to; a page of older code is found out."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def page(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("paper_page")


@pytest.fixture
def made_from(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("made_from")


@pytest.fixture
def written(page, tmp_path, monkeypatch) -> ModuleType:
    """A page of one answer."""
    (tmp_path / "tables.md").write_text(f"before\n{page.BEGIN}\n{page.END}\nbehind\n")
    monkeypatch.setattr(page, "PAGE", tmp_path / "tables.md")
    monkeypatch.setattr(page, "RECORD", tmp_path / "tables.json")
    case = page.Boards(environment="a-100", model="bert-small")
    answer = page.ASTEROID(case).answer("ddp")
    recorded = next(entry for entry in page.ASTEROID.recorded() if entry.contender == "ddp")
    assert answer.samples_per_s == recorded.samples_per_s
    page.write_page([], "none", [recorded], page.digest_of(page.SCRIPT))
    return page


def test_a_page_of_this_code_is_not_asked_again(written, capsys):
    assert written.check_page() == 0
    assert "is of this code" in capsys.readouterr().out
    text = written.PAGE.read_text()
    assert text.startswith("before\n")
    assert text.endswith("behind\n")


def other_code(page: ModuleType, factor: float = 1.0) -> None:
    record = json.loads(page.RECORD.read_text())
    record["code"] = "other"
    record["answers"][0]["samples_per_s"] *= factor
    page.RECORD.write_text(json.dumps(record))


def test_where_code_differs_answers_are_asked_again(written, capsys):
    other_code(written)
    assert written.check_page() == 0
    assert "1 of its answers were asked again and are the same" in capsys.readouterr().out


def test_a_page_whose_figures_the_code_no_longer_gives_is_stale(written, capsys):
    other_code(written, factor=1.01)
    assert written.check_page() == 1
    said = capsys.readouterr().err
    assert "tables.md is older than the code that it shows; run: python benchmarks/paper_tables.py --write" in said
    assert "environment a-100, model bert-small: ddp: " in said


def test_a_page_that_was_edited_is_found_out(written, capsys):
    written.PAGE.write_text(written.PAGE.read_text().replace("none", "some"))
    assert written.check_page() == 1
    assert "is not what was written" in capsys.readouterr().err


def test_each_contender_is_asked_and_other_code_asks_others(page):
    answers = [
        {"of": "asteroid", "case": {"number": number}, "contender": name, "seconds": seconds}
        for name, seconds in (("quick", 0.1), ("slow", 9.0))
        for number in range(20)
    ]
    answers[25]["seconds"] = 5.0
    asked = [{entry["contender"]: entry for entry in page.sample(answers, code)} for code in map(str, range(9))]
    assert all(found.keys() == {"quick", "slow"} for found in asked)
    assert {found["slow"]["seconds"] for found in asked} == {5.0}
    assert len({found["quick"]["case"]["number"] for found in asked}) > 2


@pytest.fixture
def folder(made_from, tmp_path, monkeypatch) -> Path:
    """A script, a module that it imports, one that it does not, and data."""
    monkeypatch.setattr(made_from, "ROOT", tmp_path)
    monkeypatch.setattr(made_from, "SCRIPTS", tmp_path)
    monkeypatch.setattr(made_from, "FOLDERS", (tmp_path,))
    monkeypatch.setattr(made_from, "DATA", (tmp_path / "data",))
    (tmp_path / "data").mkdir()
    (tmp_path / "script.py").write_text("import module\n")
    (tmp_path / "module.py").write_text("def three():\n    return 3\n")
    (tmp_path / "stranger.py").write_text("\n")
    (tmp_path / "data" / "kinds.yaml").write_text("a: 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "same"),
    [
        ("stranger.py", "a = 1\n", True),
        ("script.py", "import module, ast\n", False),
        ("script.py", "import module, stranger\n", False),
        ("module.py", "def three():\n    return 4\n", False),
        ("data/kinds.yaml", "a: 2\n", False),
    ],
)
def test_a_digest_is_of_all_that_the_script_imports_and_data(made_from, folder, name, text, same):
    first = made_from.digest_of(folder / "script.py")
    (folder / name).write_text(text)
    assert (made_from.digest_of(folder / "script.py") == first) is same


def test_a_result_says_whether_its_code_has_changed_since(made_from, folder):
    record = folder / "speed.json"
    for about, fresh, said in (
        ({"date": "today"}, False, "made before digests were kept"),
        ({"script": "gone.py", "code": "1"}, False, "gone.py is no more"),
        ({"script": "script.py", "code": "1"}, False, "older than the code of script.py"),
        ({"script": "script.py", "code": made_from.digest_of(folder / "script.py")}, True, "of this code"),
    ):
        record.write_text(json.dumps(about))
        found, words = made_from.state_of(record)
        assert (found, words.startswith(said)) == (fresh, True), words


def test_each_result_keeps_the_digest_of_its_script(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    results, made_from = (importlib.import_module(name) for name in ("results", "made_from"))
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "adapter.py")])
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.save("new", ["table"], {"rows": []})
    assert made_from.state_of(tmp_path / "new.json")[0]
