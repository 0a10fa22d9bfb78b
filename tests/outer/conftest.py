"""A run of a real master, which must leave nothing behind."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.outer.masters import MasterRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MasterRun]:
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        yield MasterRun(tmp_path, stack)
    left = [one for one in set(threading.enumerate()) - before if one.name.startswith(("outer", "control"))]
    assert not left
    assert not list(tmp_path.glob("master*"))
