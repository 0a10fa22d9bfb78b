"""A run of a real master, which must leave nothing behind."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.outer.masters import MasterRun
from testing.patience import no_threads_left


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MasterRun]:
    with no_threads_left(), contextlib.ExitStack() as stack:
        yield MasterRun(tmp_path, stack)
    assert not list(tmp_path.glob("master*"))
