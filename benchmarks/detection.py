"""Print how soon a coordinator knows that a worker is gone, and whether it ever takes one that is there for lost.

python benchmarks/detection.py [--busy 0] [--rounds 5] [--calm-s 30]

Real: processes, signals, TCP on loopback, TLS; limits as by default. Workers join as from other machines and wait for
orders; `--busy` processes compute beside them. In each round one is killed (its connections close), one is stopped
(a machine that falls silent), and one stands still for a second, which is no loss. The figures are seconds from the
signal to the coordinator's word. Wanted: killed under 0.5 s and silent under 2 s on a machine that has time.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import wait_for
from spantrain.runtime.coordinator.coordinator import Coordinator
from spantrain.runtime.launch.launcher import LocalWorkers, WorkerPlacement
from spantrain.runtime.worker.settings import WorkerSettings

NAMES = ("a", "b", "c", "d")
AWAITED = "e"
"""A device whose worker never comes: while it is awaited, the coordinator says who goes."""
WAIT_S = 60.0
SETTLED_S = 10.0
"""Until enough heartbeats of a new worker are known."""


class Told(Exception):
    """Somebody is gone."""


class Watched:
    """A coordinator and its workers."""

    def __init__(self, workers: LocalWorkers) -> None:
        self.workers = workers
        self.coordinator = Coordinator(bind="127.0.0.1:0", devices=(*NAMES, AWAITED))

    def join(self, *names: str) -> None:
        """Start workers, and wait until enough of their heartbeats are known."""
        where = self.coordinator.join_address, self.coordinator.token
        settings = [WorkerSettings(join=where[0], token=where[1], name=name, backend="cpu") for name in names]
        self.workers.start([WorkerPlacement(settings=one) for one in settings])
        wait_for(self.coordinator, names, WAIT_S, SilentReporter())
        gone = self.word(SETTLED_S)
        assert gone is None, f"a false alarm: {gone}"

    def word(self, within_s: float) -> tuple[float, str] | None:
        """Wait for word of somebody who is gone; return when it came, and what it is."""
        ends_s = time.monotonic() + within_s
        told: list[tuple[float, str]] = []

        class Ticks(SilentReporter):
            def progress(self, _done: int, _total: int, _text: str) -> None:
                if told or time.monotonic() > ends_s:
                    raise Told

        def news(text: str) -> None:
            if " is gone: " in text:
                told.append((time.monotonic(), text.split(" It is waited for")[0]))

        with contextlib.suppress(Told):
            wait_for(self.coordinator, (*NAMES, AWAITED), 2 * WAIT_S, Ticks(), tell=news)
        return told[0] if told else None

    def process(self, name: str) -> psutil.Process:
        """Return a worker's process."""
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/1") == str(self.workers.log_of(name)):
                    return process
        raise AssertionError(f"{name} has no worker")

    def lose(self, name: str, how: signal.Signals) -> float:
        """Send a signal; return the seconds until it is known, and have another worker join in its place."""
        process = self.process(name)
        since_s = time.monotonic()
        process.send_signal(how)
        told = self.word(WAIT_S)
        assert told is not None, f"{name} is gone, and nobody has said so"
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        print(f"  {how.name}: {told[0] - since_s:.2f} s: {told[1]}", flush=True)
        self.join(name)
        return told[0] - since_s

    def stand_still(self, name: str) -> None:
        """Stop a worker for a second."""
        process = self.process(name)
        process.send_signal(signal.SIGSTOP)
        told = self.word(1.0)
        process.send_signal(signal.SIGCONT)
        told = told or self.word(3.0)
        assert told is None, f"a false alarm: {told}"


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Have processes that compute beside."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calm-s", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalWorkers(Path(folder) / "logs") as workers:
        watched = Watched(workers)
        watched.coordinator.start()
        try:
            watched.join(*NAMES)
            with busy(options.busy):
                told = watched.word(options.calm_s)
                assert told is None, f"a false alarm: {told}"
                killed, silent = [], []
                for _ in range(options.rounds):
                    killed.append(watched.lose("b", signal.SIGKILL))
                    silent.append(watched.lose("c", signal.SIGSTOP))
                    watched.stand_still("d")
        finally:
            watched.coordinator.stop()
    for what, took in (("killed", killed), ("silent", silent)):
        print(f"{what}: known after {statistics.median(took):.2f} s (median), {max(took):.2f} s (worst)")
    print(f"no false alarm; {options.busy} busy processes beside, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
