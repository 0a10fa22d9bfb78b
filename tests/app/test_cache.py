"""What is kept between runs is kept by what it was made of."""

from dataclasses import replace
from pathlib import Path

from spantrain.app.cache import state_folder
from spantrain.app.profiling.describe import BUILDERS, described_profile, graph_file
from spantrain.config.artefacts import write_artefact
from spantrain.config.cluster_file import load_preset
from spantrain.config.files.text_files import code_digest
from testing.models.small import small_spec


def test_a_digest_changes_with_names_and_contents_of_code_only(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("first")
    before = code_digest(tmp_path)
    (tmp_path / "notes.md").write_text("no code")
    assert code_digest(tmp_path) == before
    seen = {before}
    for name, text in (("one.py", "other"), ("inner/two.py", "first"), ("inner/three.py", "")):
        (tmp_path / name).write_text(text)
        seen.add(code_digest(tmp_path))
    (tmp_path / "one.py").rename(tmp_path / "uno.py")
    seen.add(code_digest(tmp_path))
    assert len(seen) == 5


def test_a_graph_is_built_once_by_each_code(tmp_path: Path, monkeypatch) -> None:
    """The file that a first look leaves is read by a second one, and by nobody whose code is another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    laptop, model = load_preset("laptop"), small_spec("gpt2", layers=1)
    built = described_profile(laptop, model).graph
    (kept,) = (tmp_path / "spantrain").iterdir()
    marked = replace(built, units=tuple(replace(unit, unit_class="from the file") for unit in built.units))
    write_artefact(marked, "spantrain-graph", kept)
    assert described_profile(laptop, model).graph == marked
    code = tmp_path / "code"
    code.mkdir()
    (code / "one.py").write_text("other code")
    assert graph_file(model, "float32", BUILDERS) == kept != graph_file(model, "float32", (code,))


def test_what_is_left_to_be_looked_at_is_in_the_users_state_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert state_folder() == tmp_path / ".local/state/spantrain"
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_folder() == Path("/state/spantrain")
