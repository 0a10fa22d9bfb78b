"""The sides of `lost_device_rivals.py`: each trains, loses a device, gets it back; all tell what happened when."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from recovery import AFTER, BEFORE, Case, Watcher
from spantrain.config.artefacts import write_profile
from spantrain.runtime.coordinator.barrier import StepOutcome

WORKER = Path(__file__).with_name("lost_device_rivals_worker.py")
PATIENCE_S = 90.0
"""For anything that is waited for."""
MOST_STEPS = 60
"""Steps in which a device that comes back is waited for."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that counts."""

    ended_s: float
    """On this machine's clock; of the device that is last."""
    loss: float
    devices: frozenset[str]


@dataclass(kw_only=True)
class Story:
    """What happened in a run of one side."""

    steps: dict[int, Step] = field(default_factory=dict)
    struck_s: float = 0.0
    known_s: float = 0.0
    """When the first of those that are left knew of the loss."""
    again_s: float = 0.0
    """When the device's process was started again."""
    redone: int = 0
    """Steps begun and not counted, before the device was started again."""
    starts_s: float = 0.0
    """What new processes of those that were left took to get ready, after the loss: the slowest of them."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What is done to a run, and when."""

    victim: str
    part: float
    """Of a step's time, behind the end of one, until the device is killed."""


class OurWatcher(Watcher):
    """Kills a device, starts it again once some steps are done without it, and ends the run when it is back."""

    def __init__(self, moments: Moments) -> None:
        super().__init__(at=self._strike)
        self.moments = moments
        self.story = Story()
        self._back = 0

    def step(self, outcome: StepOutcome, metrics: object, total_steps: int) -> None:
        """Note it."""
        assert outcome.loss is not None
        devices = frozenset(name for name, busy_s in outcome.busy_s.items() if busy_s > 0)
        self.story.steps[outcome.step] = Step(ended_s=outcome.closed_s, loss=outcome.loss, devices=devices)
        super().step(outcome, metrics, total_steps)
        if len(self.steps) == BEFORE + AFTER:
            assert self.session is not None
            self.story.again_s = time.monotonic()
            self.session.start_again(self.moments.victim)
        if self.story.again_s and self.moments.victim in devices:
            self._back += 1
        if self._back == AFTER or len(self.steps) == MOST_STEPS:
            self.stop.ask()

    def _strike(self, _watcher: Watcher) -> None:
        delay_s = self.steps[-1].duration_s * self.moments.part
        threading.Timer(delay_s, self.kill, (self.moments.victim,)).start()


def ours(case: Case, folder: Path, moments: Moments) -> Story:
    """SpanTrain, by a plan of its planner."""
    watcher = OurWatcher(moments)
    outcome = case.run(folder, watcher, steps=MOST_STEPS)
    story = watcher.story
    story.struck_s = watcher.struck_s
    story.known_s = watcher.when("Training goes on after") - outcome.plan_changes[0].duration_s
    lost = [text for _, text in watcher.notes if text.startswith(f"{moments.victim} lost")]
    story.redone = sum("is trained again" in text for text in lost)
    return story


class Rival:
    """Processes of a rival, one for each device and one at which they meet, and what they tell."""

    def __init__(self, role: str, meeting: str, case: Case, folder: Path) -> None:
        """Begin in an empty folder; nothing is started yet."""
        self._role, self._meeting, self._folder = role, meeting, folder
        self._diary = folder / "diary.jsonl"
        self._address = ""
        self.devices = tuple(case.profile.cluster.device_by_name)
        self.processes: dict[str, psutil.Popen] = {}
        folder.mkdir(parents=True)
        write_profile(case.profile, folder / "profile.json")

    def begin(self) -> None:
        """Start what the devices meet at, and all devices."""
        self._start(self._meeting)
        self._address = self.wait(lambda lines: [line["address"] for line in lines if line["what"] == "meeting"])[0]
        for device in self.devices:
            self.start(device)

    def start(self, device: str) -> None:
        """Start a device's processes."""
        self._start(self._role, device, self._address)

    def _start(self, role: str, *more: str) -> None:
        name = more[0] if more else role
        # A store that outlives a round has addresses of lost devices, which TorchElastic's workers would then call.
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = psutil.Popen(
                [sys.executable, "-W", "ignore", str(WORKER), role, str(self._folder), *more],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **settings},
                start_new_session=True,
            )  # fmt: skip

    def kill(self, device: str) -> None:
        """Kill a device with all that runs on it."""
        process = self.processes[device]
        for one in (*process.children(recursive=True), process):
            one.kill()
        process.wait()

    def lines(self) -> list[dict[str, Any]]:
        """Return what was told so far."""
        if not self._diary.exists():
            return []
        whole = self._diary.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait(self, found: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """Return what is found in what is told, as soon as there is something."""
        until_s = time.monotonic() + PATIENCE_S
        while not (result := found(self.lines())):
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if time.monotonic() > until_s or ended:
                logs = "\n".join(f"{path.name}: ...{path.read_text()[-600:]}" for path in self._folder.glob("*.log"))
                raise RuntimeError(f"{self._role}: waited {PATIENCE_S:g} s at most; ended: {ended}\n{logs}")
            time.sleep(0.005)
        return result

    def close(self) -> None:
        """Kill all that is left."""
        for process in self.processes.values():
            try:
                every = (*process.children(recursive=True), process)
            except psutil.NoSuchProcess:
                continue
            for one in every:
                try:
                    one.kill()
                except psutil.NoSuchProcess:
                    continue
            process.wait()


def torchft(case: Case, folder: Path, moments: Moments) -> Story:
    """The model whole on each device, under torchft."""
    with closing(Rival("torchft", "lighthouse", case, folder)) as rival:
        return _told(rival, moments)


def elastic(case: Case, folder: Path, moments: Moments) -> Story:
    """The model whole on each device, under TorchElastic and DistributedDataParallel."""
    with closing(Rival("elastic", "store", case, folder)) as rival:
        return _told(rival, moments)


def _told(rival: Rival, moments: Moments) -> Story:
    """Train with all, kill one, start it again, until it takes part."""
    victim, story = moments.victim, Story()
    rival.begin()
    whole = set(rival.devices)

    def with_all(lines: list[dict[str, Any]], after_s: float, count: int) -> list[Step]:
        every = [step for step in steps_of(lines).values() if step.devices == whole and step.ended_s > after_s]
        return sorted(every, key=lambda step: step.ended_s) if len(every) >= count else []

    calm = rival.wait(lambda lines: with_all(lines, 0.0, BEFORE))
    delay_s = calm[-1].ended_s + moments.part * (calm[-1].ended_s - calm[-2].ended_s) - time.monotonic()
    time.sleep(max(0.0, delay_s))
    story.struck_s = time.monotonic()
    rival.kill(victim)
    del rival.processes[victim]
    rival.wait(lambda lines: sum(step.ended_s > story.struck_s for step in steps_of(lines).values()) >= AFTER)
    story.again_s = time.monotonic()
    rival.start(victim)
    rival.wait(lambda lines: with_all(lines, story.again_s, AFTER))
    _sum_up(story, rival.lines(), victim)
    return story


def steps_of(lines: list[dict[str, Any]]) -> dict[int, Step]:
    """Return the steps that counted, as told by those that did them; a step's end is that of the last of them."""
    found: dict[int, Step] = {}
    for line in lines:
        if line["what"] == "step":
            found[line["step"]] = Step(
                ended_s=line["at_s"], loss=line["loss"], devices=frozenset(line["devices"])
            )  # fmt: skip
    return found


def _sum_up(story: Story, lines: list[dict[str, Any]], victim: str) -> None:
    story.steps = steps_of(lines)
    left = [line for line in lines if line["device"] != victim and story.struck_s < line["at_s"] < story.again_s]
    story.known_s = min(line["at_s"] for line in left if line["what"] == "known")
    # One device is enough to have begun a step in vain; whoever began it twice tells so twice.
    in_vain = [line["device"] for line in left if line["what"] in ("redone", "known") and "step" in line]
    story.redone = max((in_vain.count(device) for device in set(in_vain)), default=0)
    began = {line["device"]: line["at_s"] for line in left if line["what"] == "start"}
    ready = [line["at_s"] - began[line["device"]] for line in left if line["what"] == "ready"]
    story.starts_s = max(ready, default=0.0)
