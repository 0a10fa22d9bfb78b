"""Processes that benchmarks work in: none is left, whichever signal ends the benchmark."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.patience import PATIENCE_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = f"""\
import os
import signal
import sys
import time

sys.path.insert(0, {str(BENCHMARKS)!r})
from worker_pool import workers


def work(number):
    os.write(1, b"begun\\n")  # in one piece: all have the same output
    time.sleep(3600)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
    with workers(2) as pool:
        list(pool.map(work, range(4)))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_workers_end_with_who_began_them(how: signal.Signals, tmp_path: Path) -> None:
    """All have the same output: it ends when the last of them has."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        process.send_signal(how)
        rest, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert rest == ""
    assert process.returncode == -how
