"""Ctrl-C and SIGTERM, as the commands understand them."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from spantrain.errors import Interrupted

__all__ = ["clean_interrupt", "graceful_interrupt"]


@contextmanager
def clean_interrupt(what: str) -> Iterator[None]:
    """End at once on the first signal; everything that was started is taken down on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    with _handling(stop):
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(f"{what} was interrupted; nothing was left running") from None


@contextmanager
def graceful_interrupt(ask: Callable[[], bool], says: Callable[[], str]) -> Iterator[None]:
    """Count signals by `ask`, which tells whether to end at once; `says`: from where to go on then."""

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        if ask():
            raise KeyboardInterrupt
        sys.stderr.write("\nStopping after this step, with a checkpoint. Once more: stop now.\n")

    with _handling(stop):
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(f"stopped at once; {says()}") from None


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
