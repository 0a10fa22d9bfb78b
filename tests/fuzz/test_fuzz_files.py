import pytest

from fuzz.file_targets import TARGETS
from fuzz.target import Target, run_target

CASES = 250


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_a_file_holds_is_taken_or_refused(target: Target):
    assert not run_target(target, CASES).failures
