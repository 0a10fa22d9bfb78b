"""The folder of a master: one master, model and data, whole files, for its owner's eyes."""

from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.errors import UsageError
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.files import MasterFiles
from spantrain.outer.master.server import MasterServer
from spantrain.outer.policy.settings import MasterState
from testing.outer.masters import CONFIG, SETTINGS, MasterRun, seeded

TWO = MasterConfig(shards=("s0", "s1"), settings=replace(SETTINGS, fragments=2))
DAMAGED = {
    "an older format": ('{"epoch": 3, "version": 7, "seeded": true}', ("unknown key 'epoch'", "fragments: is missing")),
    "cut": ('{"fragments": [{"epoch": 3,', ("line 1: is not valid JSON",)),
    "empty": ("", ("is not valid JSON",)),
    "nothing in it": ("{}", ("fragments: is missing", "must be a list")),
    "another sort": ('{"fragments": {"epoch": 1}}', ("fragments: must be a list, got an object",)),
    "no fragments": ('{"fragments": []}', ("a state needs a fragment",)),
    "a wrong value": ('{"fragments": [{"epoch": "x"}, {}]}', ("fragments[0].epoch: must be a whole number",)),
    "an impossible value": ('{"fragments": [{"version": 5}, {}]}', ("fragments[0]: ", "next_version over version")),
    "a number without end": ('{"fragments": [{"epoch": ' + "9" * 5000 + "}]}", ("fragments[0].epoch: must be",)),
    "one fragment too many": ('{"fragments": [{}, {}, {}]}', ("3 fragments, not in 2", "`fragments: 3`")),
    "one too few": ('{"fragments": [{}]}', ("1 fragments, not in 2", "`fragments: 1`")),
    "a lease of no chunk": (
        '{"fragments": [{"chunks": {"samples": 5, "chunks": 1, "leases": [{"number": 0, "cluster": "a", '
        '"chunk": 1, "data_pass": 0, "begin": 0, "end": 5}]}}, {}]}',
        ("fragments[0].chunks: leases must be of the 1 chunks",),
    ),
}  # fmt: skip


def test_a_folder_is_for_one_master_of_one_model_and_data(run: MasterRun) -> None:
    master = run.start_master()
    with pytest.raises(UsageError, match="another master runs with this folder"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=CONFIG)
    seeded(run, "a")
    master.close()
    with pytest.raises(UsageError, match="divided over s0, s1, not over s0"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=replace(CONFIG, shards=("s0",)))
    with pytest.raises(UsageError, match="is of data of 1200 samples in 400 chunks, not of 1200 samples in 3"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=replace(CONFIG, chunks=3))
    (run.folder / "state" / "state.json").write_text('{"version": "x"}')
    with pytest.raises(UsageError, match=r"state\.json: 2 problems"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=CONFIG)
    (run.folder / "state" / "credentials.json").chmod(0o644)
    with pytest.raises(UsageError, match="others may read it"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=CONFIG)


def test_secrets_are_for_their_owner_alone(run: MasterRun) -> None:
    run.start_master()
    seeded(run, "a")
    assert (run.folder / "state").stat().st_mode & 0o077 == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run.folder / "state").iterdir()}
    assert modes == dict.fromkeys(["credentials.json", "token", "layout.json", "state.json", "lock"], 0o600)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_state_that_is_not_what_is_expected_is_refused_with_a_remedy_and_left_as_it_is(name, tmp_path: Path) -> None:
    text, says = DAMAGED[name]
    kept = tmp_path / "state.json"
    kept.write_text(text)
    kept.chmod(0o600)
    files = MasterFiles(tmp_path)
    with pytest.raises(UsageError) as caught:
        files.check(TWO)
    files.close()
    for part in (str(kept), *says, "begin with another folder"):
        assert part in str(caught.value)
    assert kept.read_text() == text
    MasterFiles(tmp_path).close()


def test_what_was_kept_is_what_is_loaded(tmp_path: Path) -> None:
    files = MasterFiles(tmp_path)
    parts = (MasterState(epoch=2, version=4, next_version=6), MasterState(epoch=2))
    state = replace(TWO.first_state(), fragments=parts)
    files.save(state)
    files.check(TWO)
    assert files.load_state(TWO) == state
    assert files.load_layout(TWO) is None
    files.close()


def test_passes_over_the_data_are_as_the_file_says_and_no_fewer_than_have_begun(tmp_path: Path) -> None:
    once = MasterConfig(shards=("s0",), samples=6, chunks=2, passes=1)
    twice = replace(once, passes=2)
    files = MasterFiles(tmp_path)
    files.save(once.first_state())
    more = files.load_state(twice)
    assert more == twice.first_state()
    assert more.leading.chunks
    begun = more.leading.chunks.with_counted(0, (1, 1))
    files.save(replace(more, fragments=(replace(more.leading, chunks=begun),)))
    with pytest.raises(UsageError, match=r"state\.json: 2 passes over the data have begun, more than `passes: 1`"):
        files.check(once)
    kept = files.load_state(replace(once, passes=None)).leading.chunks
    assert kept == replace(begun, passes=None)
    files.close()
