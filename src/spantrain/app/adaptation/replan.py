"""Plans anew for links as they are now, beside a run: a process of its own, of low priority, that has limited time.

A search takes seconds of a processor. Inside the coordinator's process it would keep the devices' reports waiting.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import psutil

from spantrain.adaptation.network_state import LinkState
from spantrain.config.artefacts import read_plan, read_profile, write_plan, write_profile
from spantrain.core.plan import Plan
from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.errors import SpanTrainError, UsageError
from spantrain.formats.registry import WireFormat
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.present import constraints_of, job_of

_LIMIT_S = 60.0
_NICE = 15
_PROFILE, _PLAN, _FOUND = "profile.json", "plan.json", "found.json"


def slowed_profile(profile: Profile, state: LinkState) -> Profile:
    """Return the profile with the links of a state; all devices of two sites get the slowest way between those."""
    place = profile.cluster.device_by_name
    ways: dict[tuple[str, str], float] = {}
    for (source, target), speed in state.speeds.items():
        way = place[source].site, place[target].site
        ways[way] = min(speed, ways.get(way, speed))
    known = {(link.source, link.target): link for link in profile.links}
    for pair in permutations(place, 2):
        speed = state.speeds.get(pair, ways.get((place[pair[0]].site, place[pair[1]].site), 1.0))
        link = profile.link(*pair) if speed < 1 else None
        if link is not None:
            known[pair] = _slower(link, speed)
    return replace(profile, links=tuple(known.values()))


def _slower(link: LinkMeasurement, speed: float) -> LinkMeasurement:
    curve = link.curve
    if curve is not None:
        points = (replace(one, bandwidth_bytes_per_s=speed * one.bandwidth_bytes_per_s) for one in curve.points)
        fitted = tuple(speed * coefficient for coefficient in curve.coefficients_bytes_per_s)
        curve = replace(curve, points=tuple(points), coefficients_bytes_per_s=fitted)
    return replace(link, bandwidth_bytes_per_s=speed * link.bandwidth_bytes_per_s, curve=curve)


def plan_again(profile: Profile, base: Plan, optimizer: str, allowed: Sequence[WireFormat] = ()) -> Plan:
    """Return what strategy `auto` makes of a profile for the devices, batch and order of work of a plan.

    Raises:
        InfeasiblePlanError: no plan uses all of these devices.
    """
    limits = constraints_of(base, profile, base.devices)
    constraints = replace(
        limits, keep=base.devices, wire_formats=tuple(dict.fromkeys((*limits.wire_formats, *allowed)))
    )
    return make_plan(profile, job_of(base, optimizer), PlanOptions(constraints=constraints, strategies=("auto",))).plan


class BackgroundPlanner:
    """One question at a time; a newer one ends what is at work on the one before."""

    def __init__(
        self,
        profile: Profile,
        base: Plan,
        optimizer: str,
        allowed: Sequence[WireFormat] = (),
        *,
        limit_s: float = _LIMIT_S,
    ) -> None:
        """Take what stays as it is: the profile of calm links, and the plan whose devices and batch are planned for."""
        self._profile = profile
        self._base = replace(base, profile=None)
        self._arguments = (optimizer, ",".join(allowed), str(limit_s), str(os.getpid()))
        self._lock = threading.Lock()
        self._closed = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, state: LinkState) -> None:
        """Begin to plan for these links; what was asked before is forgotten."""
        with self._lock:
            self._end()
            if self._closed:
                return
            self._folder = tempfile.TemporaryDirectory(prefix="spantrain-replan-")
            folder = Path(self._folder.name)
            write_profile(slowed_profile(self._profile, state), folder / _PROFILE)
            write_plan(self._base, folder / _PLAN)
            command = [sys.executable, "-m", "spantrain.app.adaptation.replan", str(folder), *self._arguments]
            silent = subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent)

    def answer(self) -> Plan | None:
        """Return the plan that was asked for, once, when it is there; None: not yet, or there is none."""
        with self._lock:
            if self._process is None or self._folder is None or self._process.poll() is None:
                return None
            try:
                return read_plan(Path(self._folder.name) / _FOUND) if self._process.returncode == 0 else None
            except UsageError:
                return None
            finally:
                self._end()

    def close(self) -> None:
        """End what is at work; nothing is asked any more."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _main(folder: Path, optimizer: str, allowed: str, limit_s: float, asker: int) -> None:
    """Answer one question; end by itself when the time is over, or whoever asked is gone."""
    os.nice(_NICE)

    def leave(code: int) -> None:
        if not psutil.pid_exists(asker):  # nobody else would remove it
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)

    timer = threading.Timer(limit_s, leave, (1,))
    timer.daemon = True
    timer.start()
    formats = tuple(WireFormat(name) for name in allowed.split(",") if name)
    try:
        found = plan_again(read_profile(folder / _PROFILE), read_plan(folder / _PLAN), optimizer, formats)
        write_plan(replace(found, profile=None), folder / _FOUND)
    except SpanTrainError:
        leave(1)
    leave(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
