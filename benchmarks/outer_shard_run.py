"""The conductor of `outer_shard.py`: starts shards and workers, tells them what the master would, takes the time."""

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spantrain.core.outer.commands import Combine, Commit, Forget, Measure, Move, OuterCommand, PushWeight, StageVersion
from spantrain.core.outer.events import (
    Committed,
    LayerTransfer,
    MeanCombined,
    Moved,
    NormsMeasured,
    Staged,
    Ticket,
    TransferWay,
)
from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout, divide
from spantrain.outer.link.codec import decode_event, encode_message, encode_value
from spantrain.outer.policy.transfers import TransferSchedule
from spantrain.transport.layers.interface import LayerLimits

SIDES = Path(__file__).with_name("outer_shard_sides.py")
PATIENCE_S = 300.0
Row = dict[str, Any]
Start = Callable[..., "subprocess.Popen[bytes]"]
"""(host, argv, **options)"""


def here(_: str, argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process on this machine."""
    return subprocess.Popen(argv, **options)


def a_layout(layers: int, layer_mb: float, shards: int) -> ShardLayout:
    """Layers of one large parameter and one small, over shards."""
    width = max(1, round((layer_mb * 1e6 / 4) ** 0.5))
    described = (
        Layer(
            name=f"{k}",
            parameters=(
                ParameterSpec(name=f"{k}.weight", shape=(width, width)),
                ParameterSpec(name=f"{k}.bias", shape=(width,)),
            ),
        )
        for k in range(layers)
    )
    return divide(tuple(described), [f"s{k}" for k in range(shards)])


class Side:
    """A process, and what it says."""

    def __init__(self, start: Start, host: str, argv: Sequence[str], said: "queue.SimpleQueue[Any]") -> None:
        words = [sys.executable, str(SIDES), *argv]
        self.process = start(host, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._what = " ".join(argv[:3])
        self._said = said
        self._closing = False
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            told = json.loads(line)
            (self._said if "event" in told or "problem" in told else self.answers).put(told)
        if not self._closing:
            for line_of in (self._said, self.answers):
                line_of.put({"problem": f"{self._what} has ended; what it wrote above says why"})

    def tell(self, **fields: Any) -> None:
        """Say a line."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(fields).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for its next line that is no event."""
        told = self.answers.get(timeout=PATIENCE_S)
        if "problem" in told:
            raise RuntimeError(told["problem"])
        return told

    def usage(self) -> dict[str, float]:
        """Return what it used so far; refuse if it refused something."""
        self.tell(usage=True)
        told = self.answer()
        if told.get("refused"):
            raise RuntimeError(f"{self._what} refused {told['refused']}")
        used: dict[str, float] = told["usage"]
        return used

    def close(self) -> None:
        """End it."""
        assert self.process.stdin
        self._closing = True
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join()


class Conductor(ExitStack):
    """Shards and workers of clusters; each worker is a cluster of its own, and holds all layers."""

    def __init__(
        self, layout: ShardLayout, workers: Sequence[str], *, encrypted: bool = True, limits: LayerLimits | None = None,
        start: Start = here, address: Callable[[str], str] = lambda _: "127.0.0.1",
    ) -> None:  # fmt: skip
        super().__init__()
        self.layout, self.workers = layout, tuple(workers)
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._next_ticket = 0
        self.version = 0
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        common = ["--limits", json.dumps(asdict(limits or LayerLimits())), *([] if encrypted else ["--plain"])]
        self.sides: dict[str, Side] = {}
        for name in layout.shards:
            place = ["--bind", f"tcp://{address(name)}:0", "--folder", str(folder / name)]
            self._open(start, name, ["shard", "--name", name, *place, *common])
        for name in workers:
            self._open(start, name, ["worker", "--name", name, *common])
        peers = {name: {**side.answer()["address"], "name": name} for name, side in self.sides.items()}
        plain = encode_value(layout)
        for names, others in ((layout.shards, workers), (workers, layout.shards)):
            for name in names:
                self.sides[name].tell(layout=plain, peers=[peers[other] for other in others])
        for side in self.sides.values():
            assert side.answer()["ready"]

    def _open(self, start: Start, name: str, argv: Sequence[str]) -> None:
        self.sides[name] = Side(start, name, argv, self._said)
        self.callback(self.sides[name].close)

    def ticket(self) -> Ticket:
        """Return a new one."""
        self._next_ticket += 1
        return Ticket(1, self._next_ticket)

    def _tell(self, name: str, command: OuterCommand) -> None:
        self.sides[name].tell(command=encode_message(command))

    def _event(self) -> tuple[Any, float]:
        told = self._said.get(timeout=PATIENCE_S)
        if "problem" in told:
            raise RuntimeError(told["problem"])
        event = decode_event(told["event"])
        if hasattr(event, "reason"):
            raise RuntimeError(event.reason)
        return event, told["at_s"]

    # Layers.

    def move_all(
        self, way: TransferWay, *, workers: Sequence[str] = (), slots: int = 2, scheduled: bool = True
    ) -> tuple[float, dict[str, Ticket]]:
        """Have workers push or pull all layers at once; return the seconds that took, and the tickets."""
        tickets = {name: self.ticket() for name in workers or self.workers}
        transfers = [
            LayerTransfer(
                ticket=ticket, cluster=name, worker=name, layer=k, shard=self.layout.shard_of(k),
                size_bytes=layer.size_bytes,
            )
            for name, ticket in tickets.items()
            for k, layer in enumerate(self.layout.layers)
        ]  # fmt: skip
        line = _Scheduled(self.layout.shards, transfers, slots) if scheduled else _InOrder(transfers, slots)
        begun_s = ended_s = time.monotonic()
        left = len(transfers)
        while left:
            for transfer in line.begin():
                move = Move(way=way, transfer=transfer, version=self.version, reason="the benchmark")
                self._tell(transfer.shard, move)
                self._tell(transfer.worker, move)
            event, at_s = self._event()
            if isinstance(event, Moved):
                line.end(event.transfer)
                ended_s = max(ended_s, at_s)
                left -= 1
        return ended_s - begun_s, tickets

    def forget(self, tickets: Iterable[Ticket]) -> None:
        """Free what shards hold of pushes."""
        for ticket in tickets:
            for name in self.layout.shards:
                self._tell(name, Forget(shard=name, ticket=ticket, reason="the benchmark"))

    # Updates.

    def _all(self, command: Any, kind: type) -> float:
        """Have all shards do something; return the seconds until the last answered."""
        begun_s = time.monotonic()
        for name in self.layout.shards:
            self._tell(name, replace(command, shard=name))
        waited = set(self.layout.shards)
        at_s = begun_s
        while waited:  # a shard also tells of itself when a snapshot is written
            event, at_s = self._event()
            if isinstance(event, kind):
                waited.remove(event.shard)
        return at_s - begun_s

    def update(self, pushes: Sequence[Ticket], *, first: bool = False) -> float:
        """Make a version of pushes; return the seconds of all its steps."""
        why, update, number = "the benchmark", self.ticket(), self.version + 1
        weights = tuple(PushWeight(push=push, part=1 / len(pushes)) for push in pushes)
        seconds = self._all(Measure(shard="", update=update, pushes=tuple(pushes), reason=why), NormsMeasured)
        if not first:
            seconds += self._all(Combine(shard="", update=update, weights=weights, reason=why), MeanCombined)
        parameters = pushes[0] if first else None
        stage = StageVersion(shard="", update=update, version=number, scale=0.5, parameters=parameters, reason=why)
        seconds += self._all(stage, Staged)
        commit = Commit(shard="", version=number, update=update, keep=(), reason=why)
        seconds += self._all(commit, Committed)
        self.version = number
        return seconds

    def seed(self) -> None:
        """Have the first worker bring the first parameters."""
        _, tickets = self.move_all(TransferWay.PUSH, workers=self.workers[:1])
        self.update(list(tickets.values()), first=True)

    def usage(self, names: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """Return what processes used so far; refuse if one of them refused something."""
        return {name: self.sides[name].usage() for name in names or self.sides}


class _Scheduled:
    """As the master orders them."""

    def __init__(self, shards: Sequence[str], transfers: Sequence[LayerTransfer], slots: int) -> None:
        self._schedule = TransferSchedule(dict.fromkeys(shards, slots), slots, patience_s=PATIENCE_S)
        self._schedule.add(transfers)

    def begin(self) -> Sequence[LayerTransfer]:
        """Return what to move now."""
        return self._schedule.begin(time.monotonic())

    def end(self, transfer: LayerTransfer) -> None:
        """Note that one has arrived."""
        self._schedule.end(time.monotonic(), transfer)


class _InOrder:
    """Each worker goes through the layers in order, whatever the others do."""

    def __init__(self, transfers: Sequence[LayerTransfer], slots: int) -> None:
        self._slots = slots
        self._waiting: Mapping[str, deque[LayerTransfer]] = defaultdict(deque)
        for transfer in transfers:
            self._waiting[transfer.worker].append(transfer)
        self._running: dict[str, int] = defaultdict(int)

    def begin(self) -> Sequence[LayerTransfer]:
        """Return what to move now."""
        begun = []
        for worker, line in self._waiting.items():
            while line and self._running[worker] < self._slots:
                self._running[worker] += 1
                begun.append(line.popleft())
        return begun

    def end(self, transfer: LayerTransfer) -> None:
        """Note that one has arrived."""
        self._running[transfer.worker] -= 1


def used_between(before: Iterable[Mapping[str, float]], after: Iterable[Mapping[str, float]], size_bytes: float) -> Row:
    """Return what processes used to move so many bytes: processor seconds, and pages that were made, by gigabyte."""
    pairs = list(zip(before, after, strict=True))
    return {
        f"{what}_per_gb": sum(then[what] - now[what] for now, then in pairs) / size_bytes * 1e9
        for what in ("cpu_s", "pages")
    }


def raw_rate(
    sinks: int, total_bytes: float, *, encrypted: bool, frame_bytes: int, start: Start = here,
    address: Callable[[str], str] = lambda _: "127.0.0.1",
) -> Row:  # fmt: skip
    """Return what `measured` does, of ZeroMQ alone, from one process to several, started as shards and a worker are."""
    plain = [] if encrypted else ["--plain"]
    bind = ["--bind", f"tcp://{address('s0')}:0"]
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with ExitStack() as stack:
        opened = [Side(start, f"s{k}", ["raw-sink", *bind, *plain], said) for k in range(sinks)]
        limits = json.dumps({"frame_bytes": frame_bytes})
        source = Side(start, "a", ["raw-source", "--limits", limits, *plain], said)
        for side in (*opened, source):
            stack.callback(side.close)
        places = [side.answer()["address"] for side in opened]
        source.answer()
        for frames, more in ((2, {"sinks": places}), (max(4, round(total_bytes / sinks / frame_bytes)), {})):
            before = [side.usage() for side in (*opened, source)]
            for side in opened:
                side.tell(frames=frames)
            source.tell(frames=frames, **more)
            begun_s = source.answer()["begun_s"]
            ended_s = max(side.answer()["done_s"] for side in opened)
        size_bytes = frames * sinks * frame_bytes
        after = [side.usage() for side in (*opened, source)]
        return {"bytes_per_s": size_bytes / (ended_s - begun_s), **used_between(before, after, size_bytes)}
