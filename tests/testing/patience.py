"""How long tests wait for what must come."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""A guard against hanging, never a measure: nothing that is waited for takes a tenth of it, on any machine."""


def until(holds: Callable[[], object]) -> None:
    """Wait for something to come true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)
