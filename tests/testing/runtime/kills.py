"""Kills a run's workers."""

import contextlib
import os
from pathlib import Path

import psutil


def kill(log: Path) -> None:
    """Kill the worker that writes a log; its parent may be another process than this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(log):
                process.kill()
                return
    raise AssertionError(f"no worker writes {log}")
