import pytest

from fuzz.network_targets import TARGETS
from fuzz.target import Target, run_target

CASES = 500


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_comes_is_taken_or_refused(target: Target):
    assert not run_target(target, CASES).failures
