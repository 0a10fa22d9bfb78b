"""Where a worker keeps what lies in folders of the coordinator's machine."""

from pathlib import Path

import pytest

from spantrain.runtime.worker import perform
from spantrain.runtime.worker.perform import folder_here


def test_it_is_the_same_path_where_that_can_be_written(tmp_path):
    out = str(tmp_path / "runs/a")
    assert folder_here("", out, written=True) == out
    assert folder_here("/data", out, written=True) == f"/data{out}"
    assert folder_here("", "", written=True) == folder_here("/data", "", written=False) == ""


@pytest.mark.parametrize("written", [True, False])
def test_it_is_in_the_users_cache_where_nothing_can_be_written(tmp_path, monkeypatch, written):
    monkeypatch.setattr(perform.os, "access", lambda _path, _mode: False)
    out = tmp_path / "runs/a"
    assert folder_here("", str(out), written=written) == str(Path.home()) + f"/.cache/spantrain{out}"
    out.mkdir(parents=True)
    assert (folder_here("", str(out), written=written) == str(out)) is not written
