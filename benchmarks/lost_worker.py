"""Print how soon a run with `--on-loss end` ends, and names the device, after one of its workers was killed.

python benchmarks/lost_worker.py [--runs 3]

Real: processes, signals, sockets on loopback. Emulated: the devices' time. The project's bound: 10 seconds.
Each run: the emulated devices of the `laptop` preset train until the first step is done; then a worker is killed.
The figure is the time from there to the end of the program, which must name the device and exit with 1.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

BOUND_S = 10.0


def spantrain(*words: object, **options: object) -> "subprocess.Popen[str]":
    """Start the program."""
    command = [sys.executable, "-m", "spantrain", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def make_plan(folder: Path) -> Path:
    """Profile the laptop preset without its network and plan for it."""
    profile, plan = folder / "profile", folder / "plan.json"
    words = ("profile", "--preset", "laptop", "--model", "gpt2-tiny", "--max-samples", 2, "--no-network")
    for step in ((*words, "--out", profile), ("plan", profile / "profile.json", "--global-batch", 16, "--out", plan)):
        program = spantrain(*step)
        _, said = program.communicate()
        if program.returncode:
            sys.exit(said)
    return plan


def worker_of(log: Path) -> psutil.Process:
    """Return the process that writes this log."""
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/fd/1").readlink() == log:
                return process
        except OSError:
            continue  # ended meanwhile, or not ours to look at
    raise AssertionError(f"nobody writes {log}")


def measure(plan: Path, out: Path) -> float:
    """Lose one worker in the middle of a run; return the seconds until the program has ended."""
    program = spantrain("train", plan, "--steps", 1_000_000, "--no-network", "--on-loss", "end", "--out", out)
    assert program.stderr is not None
    while "step 1/" not in (line := program.stderr.readline()):
        assert line, "the run ended before its first step"
    stage = json.loads(plan.read_text())["stages"][-1]
    device = stage["replicas"][0]["devices"][0]
    worker_of(out.resolve() / "logs" / f"{device}.log").kill()
    since_s = time.monotonic()
    said = program.stderr.read()
    code = program.wait()
    took_s = time.monotonic() - since_s
    assert code == 1, said
    assert f"device {device}" in said, said
    return took_s


def main() -> int:
    """Measure; return 1 if a run took longer than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = make_plan(folder)
        took = [measure(plan, folder / f"run-{run}") for run in range(options.runs)]
    worst_s = max(took)
    print(f"worker killed: the run ended after {statistics.median(took):.1f} s (median), {worst_s:.1f} s (worst)")
    print(f"bound {BOUND_S:.0f} s: {'holds' if worst_s <= BOUND_S else 'does not hold'}")
    return 0 if worst_s <= BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
