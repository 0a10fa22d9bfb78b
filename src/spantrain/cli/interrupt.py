"""Ctrl-C and SIGTERM, as the commands understand them."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from spantrain.errors import Interrupted


@contextmanager
def clean_interrupt(what: str) -> Iterator[None]:
    """End at once on the first signal; everything that was started is taken down on the way out."""
    with _stopping_at_once(lambda: True, lambda: f"{what} was interrupted; nothing was left running"):
        yield


@contextmanager
def told_interrupt(stop: Callable[[], bool]) -> Iterator[None]:
    """Tell of the first signal, which ends what `stop` says will end; a second, or one before that, ends at once."""
    told = False

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal told
        del number, frame
        if told:
            os._exit(130)
        told = stop()
        if not told:
            raise KeyboardInterrupt

    with _handling(strike):
        yield


@contextmanager
def graceful_interrupt(ask: Callable[[], bool], says: Callable[[], str]) -> Iterator[None]:
    """Count signals by `ask`, which tells whether to end at once; `says`: from where to go on then."""

    def count() -> bool:
        if ask():
            return True
        sys.stderr.write("\nStopping after this step, with a checkpoint. Once more: stop now.\n")
        return False

    with _stopping_at_once(count, lambda: f"stopped at once; {says()}"):
        yield


@contextmanager
def _stopping_at_once(ends: Callable[[], bool], says: Callable[[], str]) -> Iterator[None]:
    """Raise `Interrupted` where a signal comes that ends all, as `ends` tells."""
    struck = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal struck
        del number, frame
        if ends():
            struck = True
            raise KeyboardInterrupt

    with _handling(stop):
        try:
            yield
        except BaseException as error:
            # It may strike inside of a lock's own code, which then fails in another way.
            if struck or isinstance(error, KeyboardInterrupt):
                raise Interrupted(says()) from None
            raise


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
