"""Schedules of installed packages, by their entry points."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spantrain.cli.main import app
from spantrain.errors import UsageError
from spantrain.schedule.registry import own_schedules, schedule_named, schedule_names, schedules

_LAST_FIRST = """
from spantrain.schedule.orders import in_turn, warm_up_counts
from spantrain.schedule.dispatch.registered import RegisteredSchedule

def orders(layout, split):
    return in_turn(layout, warm_up_counts(layout, lambda left: left + 1), split=bool(split))

SCHEDULE = RegisteredSchedule(
    name="one-more", description="static: 1f1b with one forward more", splits_backward=False, orders=orders
)
OTHER_NAME = RegisteredSchedule(name="other", description="", splits_backward=False, orders=orders)
NONE = "no schedule"
"""

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Yield what installs a package with one entry point: a name and a value."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, value: str) -> None:
        (tmp_path / "more_schedules.py").write_text(_LAST_FIRST)
        info = tmp_path / "more_schedules-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more-schedules\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[spantrain.schedules]\n{name} = {value}\n")
        schedules.cache_clear()

    yield put
    sys.modules.pop("more_schedules", None)
    schedules.cache_clear()


def test_an_installed_package_adds_a_schedule(install: Install) -> None:
    install("one-more", "more_schedules:SCHEDULE")
    assert schedule_names() == (*own_schedules(), "one-more")
    assert schedule_named("one-more").description.endswith("one forward more")
    words = ["schedule", "show", "one-more", "--stages", "3", "--micro-batches", "4", "--json"]
    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["orders"][2][0][:3] == ["2F[0:1]", "2F[1:2]", "2B[0:1]"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gpipe", "more_schedules:SCHEDULE", r"'gpipe' of more-schedules .* there is a schedule of this name already"),
        ("one-more", "more_schedules:MISSING", r"'one-more' of more-schedules .* cannot be loaded"),
        ("one-more", "more_schedules:NONE", r"is a str, not a RegisteredSchedule"),
        ("one-more", "more_schedules:OTHER_NAME", r"calls itself 'other'"),
    ],
)
def test_broken_or_clashing_ones_are_refused(install: Install, name: str, value: str, message: str) -> None:
    install(name, value)
    with pytest.raises(UsageError, match=message):
        schedules()
