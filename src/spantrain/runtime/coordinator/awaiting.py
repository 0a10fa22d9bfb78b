"""Waits until devices have joined, and tells of each that comes or goes meanwhile."""

import time
from collections.abc import Callable, Sequence

from spantrain.errors import PeerLostError
from spantrain.runtime.coordinator.coordinator import Coordinator


def wait_for(
    coordinator: Coordinator,
    names: Sequence[str],
    timeout_s: float,
    on_tick: Callable[[int], None],
    on_news: Callable[[str], None] = lambda _text: None,
) -> None:
    """Wait until these devices have joined; the place of one that is lost meanwhile is free for another worker.

    Args:
        coordinator: where they join.
        names: of the devices.
        timeout_s: how long to wait for the last one.
        on_tick: hears, again and again, how many have joined.
        on_news: hears of each that comes or goes, and how to start it again.

    Raises:
        PeerLostError: some did not come in time, or the worker of one that was started here has ended.
    """
    deadline_s = time.monotonic() + timeout_s
    missing = list(names)
    while missing:
        for device, reason in coordinator.gone(names).items():
            command = coordinator.join_command(device)
            on_news(f"Device {device} is gone: {reason}. It is waited for again: {command}")
        before, missing = missing, coordinator.missing(names, unlike=missing)
        for device in before:
            if device not in missing:
                on_news(f"Device {device} has joined, {len(names) - len(missing)} of {len(names)}")
        on_tick(len(names) - len(missing))
        if missing and time.monotonic() > deadline_s:
            raise PeerLostError(
                f"{', '.join(missing)} did not join within {timeout_s:.0f} s; start there: "
                f"{coordinator.join_command(missing[0])}"
            )
