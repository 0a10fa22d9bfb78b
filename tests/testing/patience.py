"""How long tests wait for what must come."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 120.0
"""A guard against hanging, never a measure: nothing that is waited for takes a tenth of it, on any machine."""


def until(holds: Callable[[], object]) -> None:
    """Wait for something to come true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


@contextmanager
def no_threads_left() -> Iterator[None]:
    """What is begun inside must end its threads; gRPC's last one goes a moment after its server has stopped.

    The one that pyzmq starts once for all may stay.
    """
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if "zmq.utils" not in str(type(thread)):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"the thread {thread.name} is left"
