import pytest

from fuzz.file_targets import TARGETS
from fuzz.target import Target, run_target

CASES = 1000
FEWER = {"plan-explained": 200, "profile-planned": 300, "master-state": 300}
"""Of what takes ten milliseconds and more; all of them are tried by night (benchmarks/fuzz.py)."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_a_file_holds_is_taken_or_refused(target: Target):
    assert not run_target(target, FEWER.get(target.name, CASES)).failures
