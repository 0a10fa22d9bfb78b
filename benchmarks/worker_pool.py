"""Processes for a benchmark's work that end with the benchmark, however that ends."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor


def follow_parent(niceness: int = 0) -> None:
    """Make this process end when the one that began it has; for `initializer` of a pool.

    A pool ends its processes when it is closed: not when SIGTERM or SIGKILL ends whoever has it. Ctrl-C is heard by all
    processes of a terminal; here it is left to the first one, which then closes its pool.
    """
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def workers(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Give work to so many new processes; an error, or Ctrl-C, ends what they do at once."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=follow_parent) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
