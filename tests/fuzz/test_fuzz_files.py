import pytest

from fuzz.file_targets import TARGETS
from fuzz.target import Target, run_target

CASES = 1000
FEWER = {
    "plan-shown": 200,
    "plan-explained": 150,
    "plan-trained": 200,
    "profile-planned": 200,
    "master-state": 300,
}
"""Of what reads the same files as another and goes on to something that takes longer: by night there are as many."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_a_file_holds_is_taken_or_refused(target: Target):
    assert not run_target(target, FEWER.get(target.name, CASES)).failures
