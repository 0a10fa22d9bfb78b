from collections.abc import Callable

import pytest

from made_up import plan_of
from spantrain.core.plan import Plan


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return plan_of
