"""Wrong input for `outer up` and `outer master`: exit code 2, one message with a remedy, all files as they were."""

from contextlib import closing
from pathlib import Path

import pytest

from spantrain.outer.master.files import MasterFiles

CONFIG = """\
name: here
master: {address: "127.0.0.1:0", state: state/master}
shards:
  - {name: s0, address: "127.0.0.1:0", snapshots: state/s0}
"""
VERBS = pytest.mark.parametrize("verb", ["up", "master"])


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The master's folder."""
    folder = tmp_path / "state" / "master"
    folder.mkdir(parents=True, mode=0o700)
    return folder


@pytest.fixture
def refused(spantrain, tmp_path):
    """Run a verb with a file; check that it refuses in one message and changes no file; return the message."""
    config = tmp_path / "outer.yaml"

    def run(verb: str, *, says: tuple[str, ...], more: str = "") -> None:
        config.write_text(CONFIG + more)
        before = contents(tmp_path)
        ended = spantrain("outer", verb, config)
        assert ended.code == 2, ended.err
        assert ended.err.count("Error: ") == 1
        assert "Traceback" not in ended.err
        for text in (str(config), *says):
            assert text in ended.err, ended.err
        after = contents(tmp_path)
        assert {path: text for path, text in after.items() if path in before} == before
        assert {path.name for path in after.keys() - before.keys()} <= {"credentials.json", "token", "lock"}

    return run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kept(state: Path, name: str, text: str) -> None:
    (state / name).write_text(text)
    (state / name).chmod(0o600)


@VERBS
def test_settings_are_refused_all_at_once(refused, verb):
    refused(
        verb,
        more="settings: {fragments: 0, common_rounds: maybe, frgments: 2}\n",
        says=(
            "3 problems",
            "line 5, settings.fragments: '0' must be a whole number from 1 to 1000",
            "line 5, settings.common_rounds: 'maybe' must be on or off",
            "line 5, settings.frgments: unknown key 'frgments'",
        ),
    )


@VERBS
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"epoch": 3, "version": 7}', ("fragments: is missing", "an older version", "begin with another folder")),
        ('{"fragments": [{"epo', ("line 1: is not valid JSON", "take it from a copy")),
        ('{"fragments": [{}]}', ("1 fragments, not in 2", "`fragments: 1` under `settings`")),
    ],
)
def test_a_state_that_is_not_what_is_expected(refused, state, verb, text, says):
    kept(state, "state.json", text)
    refused(verb, more="settings: {fragments: 2}\n", says=("master.state: ", "state.json", *says))


@VERBS
def test_a_folder_that_cannot_be_written(refused, tmp_path, verb):
    """A file stands where the folder's parent is to be: that is the same for whoever runs this."""
    (tmp_path / "state").write_text("mine")
    refused(verb, says=("master.state: ", "cannot be made: Not a directory; choose another folder"))


@pytest.mark.parametrize("name", ["logs", "address"])
def test_what_stands_where_up_writes(refused, state, name):
    (state / name).mkdir() if name == "address" else (state / name).write_text("mine")
    refused("up", says=("master.state: ", f"{state / name}: cannot be"))


@VERBS
def test_a_folder_of_a_master_that_runs_is_left_alone(refused, state, verb):
    kept(state, "address", "127.0.0.1:29500\n")
    with closing(MasterFiles(state)):
        refused(verb, says=("another master runs with this folder; stop it, or take another",))
