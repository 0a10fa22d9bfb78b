"""The folder of a master: one master, model and data, whole files, for its owner's eyes."""

from dataclasses import replace

import pytest

from made_up_masters import CONFIG, MasterRun, seeded
from spantrain.errors import UsageError
from spantrain.outer.master_server import MasterServer


def test_a_folder_is_for_one_master_of_one_model_and_data(run: MasterRun) -> None:
    master = run.start_master()
    with pytest.raises(UsageError, match="another master runs with this folder"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=CONFIG)
    seeded(run, "a")
    master.close()
    with pytest.raises(UsageError, match="divided over s0, s1, not over s0"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=replace(CONFIG, shards=("s0",)))
    with pytest.raises(UsageError, match="is of data of 1200 samples in 400 chunks, not of 1200 in 3"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=replace(CONFIG, chunks=3))
    (run.folder / "state" / "state.json").write_text('{"version": "x"}')
    with pytest.raises(UsageError, match=r"state\.json.*version"):
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
