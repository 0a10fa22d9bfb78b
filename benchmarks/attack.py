"""Print what floods on a run's relay, page and metrics cost its training: seconds a step, and processor time by victim.

python benchmarks/attack.py [--pairs 7] [--window-s 6] [--before-s 8] [--rate 200] [--held 1000]

Two devices in two sites train gpt2-tiny; all that passes between them goes through a relay. Windows with a flood and
without alternate; a figure is the median over pairs of neighbours, beside the least and the most. The case `nothing` is
a window without a flood, treated as if it had one: what is no larger than its figures is noise. A flood opens `--rate`
connections a second to each port it is for, so many seconds before its window (what is taken at once, up to 1,024
connections, is taken then), keeps the last `--held` of them open, and says in turn nothing, half of
what is wanted, what is wanted with a wrong token, and rubbish. `a worker's port` is the one that the relay gives a
worker: what is said there reaches the worker itself.

Real: processes, computation, gradients, TCP, TLS, CURVE, HTTP, refusals. Emulated: machines. All are this one, so what
floods computes here, too: training has one half of the cores, and relay, page and what floods, with the lowest
priority, the other. With one core there are no halves: then only processor time says something. The bound: 1 %.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

BOUND = 0.01
SETTLE_S = 1.0
CORES = sorted(os.sched_getaffinity(0))
TRAINING, OTHERS = (CORES[: (len(CORES) + 1) // 2], CORES[(len(CORES) + 1) // 2 :] or CORES)
CLUSTER = """
name: attacked
kinds:
  slow: {peak_fp16: 5 GFLOP/s, peak_fp32: 5 GFLOP/s, memory: 8 GiB, memory_bandwidth: 1 GB/s, power: 9 W, source: us}
sites:
  - name: lab
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts: [{name: lab, backend: cpu, devices: {slow: 1}}]
  - name: home
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts: [{name: home, backend: cpu, devices: {slow: 1}}]
links: [{between: all, bandwidth: 100 Mbit/s, latency: 1 ms}]
"""
RUBBISH = (b"\xff" * 32768, b"GET / HTTP/1.1\r\n" * 8)
HALF_A_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
WRONG_TOKEN = HALF_A_REQUEST + b"Authorization: Bearer wrong\r\n\r\n"
HALF_A_GREETING = b"STRELAY1T" + bytes(16)
WRONG_PROOF = b"STRELAY1T" + bytes(64)
WRONG_NUMBER = b"STRELAY1B" + bytes(32)
HALF_OF_ZMQ = b"\xff" + bytes(8) + b"\x7f"
TO_HTTP = (b"", HALF_A_REQUEST, WRONG_TOKEN, *RUBBISH)
TO_RELAY = (b"", HALF_A_GREETING, WRONG_PROOF, WRONG_NUMBER, *RUBBISH)
TO_WORKER = (b"", HALF_OF_ZMQ, *RUBBISH)


class Flood:
    """Connections to one port, in a thread."""

    def __init__(self, port: int, openings: Sequence[bytes], *, per_s: float, held: int) -> None:
        self.opened = 0
        self._port, self._openings, self._per_s, self._held = port, openings, per_s, held
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Flood":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        open_ones: collections.deque[socket.socket] = collections.deque()
        begin_s = time.monotonic()
        while not self._ends.wait(max(0.0, begin_s + self.opened / self._per_s - time.monotonic())):
            line = socket.socket()
            line.setblocking(False)
            open_ones.append(line)
            with contextlib.suppress(OSError):
                line.connect_ex(("127.0.0.1", self._port))
                line.send(self._openings[self.opened % len(self._openings)])
            self.opened += 1
            if len(open_ones) > self._held:
                open_ones.popleft().close()
        for line in open_ones:
            line.close()


@dataclass(frozen=True, kw_only=True)
class Window:
    """What some seconds of training took."""

    step_s: float
    steps: int
    cpu_s: Mapping[str, float]
    """Processor time of each victim, a second."""

    @property
    def training_cpu_s(self) -> float:
        """Processor time of coordinator and workers, a step."""
        return self.cpu_s["training"] * self.step_s


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A window with a flood, and what was before and behind it."""

    quiet: Window
    under: Window
    opened_per_s: float


@dataclass(kw_only=True)
class Attacked:
    """A run under way, and where it can be attacked."""

    out: Path
    victims: dict[str, list[psutil.Process]]
    ports: dict[str, tuple[tuple[int, Sequence[bytes]], ...]]

    def window(self, seconds: float, settle_s: float = SETTLE_S) -> Window:
        """Let it train for some seconds, a while from now."""
        time.sleep(settle_s)
        metrics = self.out / "metrics.jsonl"
        offset, before, since_s = metrics.stat().st_size, self._cpu_s(), time.monotonic()
        time.sleep(seconds)
        took_s, after = time.monotonic() - since_s, self._cpu_s()
        lines = metrics.read_bytes()[offset:].decode().splitlines()
        assert len(lines) > 2, "it stands still"
        steps = [row for row in map(json.loads, lines[:-1]) if row["event"] == "step"]
        cpu_s = {name: (after[name] - before[name]) / took_s for name in after}
        return Window(step_s=statistics.fmean(row["step_s"] for row in steps), steps=len(steps), cpu_s=cpu_s)

    def _cpu_s(self) -> dict[str, float]:
        found = {}
        for name, processes in self.victims.items():
            times = [process.cpu_times() for process in processes]
            found[name] = sum(one.user + one.system for one in times)
        return found


def spantrain(*words: object, cores: Sequence[int], **variables: str) -> "subprocess.Popen[str]":
    """Start the program on some cores."""
    os.sched_setaffinity(0, cores)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "spantrain", *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables},
        )  # fmt: skip
    finally:
        os.sched_setaffinity(0, OTHERS)


def hear(program: "subprocess.Popen[str]", pattern: str) -> re.Match[str]:
    """Read what a program says until a line has this."""
    assert program.stdout is not None
    said = []
    while line := program.stdout.readline():
        said.append(line)
        if found := re.search(pattern, line):
            return found
    sys.exit(f"it has never said {pattern!r}, but: {''.join(said)}")


def let_talk(stream: IO[str] | None) -> None:
    """Read and forget what a program says from now on."""
    assert stream is not None
    threading.Thread(target=collections.deque, args=(stream, 0), daemon=True).start()


def planned(folder: Path) -> Path:
    """Return the file of a plan over both sites."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    words = ("--cluster", folder / "cluster.yaml", "--model", "gpt2-tiny", "--global-batch", 8)
    plan = folder / "plan.json"
    program = spantrain("plan", *words, "--keep", "lab", "--keep", "home", "--out", plan, cores=CORES)
    hear(program, r"Wrote|written")
    program.communicate()
    return plan


@contextlib.contextmanager
def attacked(folder: Path) -> Iterator[Attacked]:
    """Start a relay, a coordinator with a page, and two workers with metrics; give them when they train."""
    plan = planned(folder)
    token, tokens, out = secrets.token_urlsafe(24), folder / "relay.tokens", folder / "run"
    tokens.touch(0o600)
    tokens.write_text(f"us {token}\n")
    with ExitStack() as stack:

        def start(*words: object, cores: Sequence[int], **variables: str) -> "subprocess.Popen[str]":
            program = spantrain(*words, cores=cores, **variables)
            stack.callback(end, program)
            return program

        relay = start(
            "relay", "--listen", "127.0.0.1:0", "--ports", "20000-20099", "--token-file", tokens, "--json", cores=OTHERS
        )
        at = hear(relay, r'"listen": "(127\.0\.0\.1:(\d+))"')
        train = start(
            "train", plan, "--steps", 10**6, "--out", out, "--listen", "127.0.0.1:0", "--page",
            "--adapter", "off", cores=TRAINING,
        )  # fmt: skip
        page = int(hear(train, r"page: http://127\.0\.0\.1:(\d+)/")[1])
        join = hear(train, r"SPANTRAIN_TOKEN=(\S+) spantrain worker --join (\S+)")
        known = {"SPANTRAIN_TOKEN": join[1], "SPANTRAIN_RELAY_TOKEN": token, "SPANTRAIN_METRICS_TOKEN": "t" * 32}
        workers = [
            start(
                "worker", "--join", join[2], "--name", name, "--relay", at[1], "--metrics", "127.0.0.1:0",
                cores=TRAINING, **known,
            )
            for name in ("lab", "home")
        ]  # fmt: skip
        metrics = [int(hear(worker, r"Metrics: http://127\.0\.0\.1:(\d+)/")[1]) for worker in workers]
        given = [int(hear(relay, r'"joined".*"ports": \[(\d+)\]')[1]) for _ in workers]
        hear(train, r"step 1/")
        for program in (relay, train, *workers):
            let_talk(program.stdout)
        pages = pages_of(train)
        ports: dict[str, tuple[tuple[int, Sequence[bytes]], ...]] = {
            "relay": ((int(at[2]), TO_RELAY),), "a worker's port": ((given[0], TO_WORKER),),
            "page": ((page, TO_HTTP),), "metrics": ((metrics[0], TO_HTTP),),
        }  # fmt: skip
        yield Attacked(
            out=out,
            victims={
                "training": [psutil.Process(one.pid) for one in (train, *workers)],
                "relay": [psutil.Process(relay.pid)],
                "page": pages,
            },
            ports={"nothing": (), **ports, "all": tuple(port for found in ports.values() for port in found)},
        )


def pages_of(train: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the process of a run's page, on the cores of the others: it has inherited those of training."""
    found = [one for one in psutil.Process(train.pid).children() if "spantrain.app.watching.server" in one.cmdline()]
    for one in found:
        one.cpu_affinity(OTHERS)
    return found


def end(program: "subprocess.Popen[str]") -> None:
    """Stop a program at once."""
    program.kill()
    program.wait()


def measure(run: Attacked, case: str, options: argparse.Namespace) -> Pair:
    """Return a window without a flood, half before and half behind, and one with it."""
    half_s = options.window_s / 2
    before = run.window(half_s)
    with ExitStack() as stack:
        floods = [
            stack.enter_context(Flood(port, openings, per_s=options.rate, held=options.held))
            for port, openings in run.ports[case]
        ]
        under = run.window(options.window_s, options.before_s)
        opened = sum(flood.opened for flood in floods) / (options.window_s + options.before_s)
    after = run.window(half_s)
    steps = before.steps + after.steps
    quiet = Window(
        step_s=(before.step_s * before.steps + after.step_s * after.steps) / steps,
        steps=steps,
        cpu_s={name: (before.cpu_s[name] + after.cpu_s[name]) / 2 for name in before.cpu_s},
    )
    return Pair(quiet=quiet, under=under, opened_per_s=opened)


def told(case: str, pairs: Sequence[Pair]) -> tuple[str, float]:
    """Return a line of the table, and how much slower a step is."""
    slower = [pair.under.step_s / pair.quiet.step_s - 1 for pair in pairs]
    dearer = [pair.under.training_cpu_s / pair.quiet.training_cpu_s - 1 for pair in pairs]
    opened, step_s = (
        statistics.median(values)
        for values in ([pair.opened_per_s for pair in pairs], [pair.quiet.step_s for pair in pairs])
    )
    columns = [f"{case:16} {opened:8.0f} {1e3 * step_s:8.1f} ms", f"{_spread(slower):>26}", f"{_spread(dearer):>26}"]
    for name in ("relay", "page"):
        more = statistics.median(pair.under.cpu_s[name] - pair.quiet.cpu_s[name] for pair in pairs)
        columns.append(f"{more:8.1%}")
    return " ".join(columns), statistics.median(slower)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):+.1%} ({min(values):+.1%} to {max(values):+.1%})"


def main() -> int:
    """Measure; return 1 if training was slowed by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--window-s", type=float, default=6.0)
    parser.add_argument("--before-s", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--held", type=int, default=1000)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder, attacked(Path(folder)) as run:
        found: dict[str, list[Pair]] = {case: [] for case in run.ports}
        for pair in range(options.pairs):
            for case, pairs in found.items():
                pairs.append(measure(run, case, options))
            print(f"pair {pair + 1} of {options.pairs}", file=sys.stderr, flush=True)
    print(f"{options.rate:g} connections a second to each port wanted, {options.held} held; {len(CORES)} cores")
    head = f"{'flood on':16} {'opened/s':>8} {'a step':>11} {'takes longer by':>26} {'computes longer by':>26}"
    print(f"{head} {'relay':>8} {'page':>8}")
    worst = 0.0
    for case, pairs in found.items():
        line, slower = told(case, pairs)
        worst = max(worst, slower)
        print(line)
    print("relay, page: further processor time, of a core")
    print(f"bound {BOUND:.0%}: {'holds' if worst <= BOUND else 'does not hold'}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
