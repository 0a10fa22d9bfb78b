"""All that a user does in a row, by the command line: three machines with sshd, joined by a shaped network, are found,
checked, planned for and trained on, looked at in a browser; one is killed, one leaves, and the run ends as it should.
"""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spantrain.testbed.testbed import Testbed
from testing.machines import interpreter, joined, ssh_config, sshd_words, tool, wait_for_sshd, workers
from testing.patience import PATIENCE_S
from testing.programs import Program, nothing_is_left, programs

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

PLACES = ("lab", "office", "home")
STEPS = 80
OLD = "{peak_fp16: 5 GFLOP/s, peak_fp32: 5 GFLOP/s, memory: 8 GiB, memory_bandwidth: 1 GB/s, power: 9 W, source: test}"
"""A kind so slow that three of it are quicker than one, however far from each other."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ASK = """
import sys, urllib.request
url, token = sys.argv[1:]
print(urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": "Bearer " + token})).read().decode())
"""


@dataclass
class Day:
    """What the commands have said, in their order, and what they left."""

    cluster: str = ""
    doctor: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    """By the page, while three machines trained."""
    without_browser: str = ""
    """Why nobody looked at it with one."""
    shown: str = ""
    """By the page in a browser, while it trained, and behind the loss."""
    map: str = ""
    troubles: list[str] = field(default_factory=list)
    why: str = ""
    told: str = ""
    """By the run."""
    run: dict[str, Any] = field(default_factory=dict)
    view: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, Any] = field(default_factory=dict)
    """A run of the same samples on one device that nothing befalls."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the user: with code of theirs, an interpreter that has SpanTrain, and an ssh configuration of their own."""
    folder = tmp_path_factory.mktemp("day")
    (folder / "code").mkdir()
    (folder / "code" / "own.py").write_text("x = 1\n")
    (folder / "temporary").mkdir()
    here = f"XDG_CACHE_HOME={folder}/cache TMPDIR={folder}/temporary OMP_NUM_THREADS=1"
    tool(folder, "python3", f'{here} exec {interpreter(folder)} "$@"')
    return folder


@pytest.fixture(scope="module")
def network(folder) -> Iterator[Testbed]:
    """One host at each place, with sshd."""
    with joined(PLACES, latency_s=0.02, folder=folder) as network:
        ssh_config(folder, {place: network.address(place) for place in PLACES})
        servers = [network.popen(place, sshd_words(folder, "-D"), stderr=subprocess.DEVNULL) for place in PLACES]
        wait_for_sshd(network, PLACES)
        yield network
        for server in servers:
            server.kill()
            server.wait()


@pytest.fixture(scope="module")
def day(folder, network, tmp_path_factory) -> Day:
    day, inside = Day(), network.namespace("lab").command([])

    def spantrain(*words: object) -> str:
        """Run a command at the lab, in the user's folder."""
        line = [*inside, sys.executable, "-m", "spantrain", *map(str, words)]
        ended = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=PATIENCE_S, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    reach = ("--ssh-config", "ssh_config", "--python", folder / "python3")
    day.cluster = spantrain("init", "--ssh", ",".join(PLACES), *reach, "--out", "cluster.yaml")
    slow = day.cluster.replace("kind: cpu,", "kind: old, backend: cpu,")  # where two are quicker than one
    (folder / "cluster.yaml").write_text(f"{slow}kinds:\n  old: {OLD}\n")
    day.doctor = json.loads(spantrain("doctor", "--quick", "--json", "--cluster", "cluster.yaml", *reach))
    plan = ("plan", "--cluster", "cluster.yaml", "--model", "gpt2-tiny", "--global-batch", 8)
    keep = [word for place in PLACES for word in ("--keep", place)]
    spantrain(*plan, *keep, "--out", "plan.json")
    spantrain(*plan, *(word for place in PLACES[1:] for word in ("--leave-out", place)), "--out", "alone.json")
    launch = (
        "launch", "--ssh", "--option", f"-F {folder}/ssh_config", "--python", folder / "python3",
        "--code", folder / "code", "--",
    )  # fmt: skip
    with programs(tmp_path_factory.mktemp) as start, browser(day, folder, inside) as page:
        train = ("--steps", STEPS, "--learning-rate", 1e-4)
        watched = ("--out", folder / "run", "--page", "--protect", "one", "--adapter", "off")
        program = start(*launch, "train", folder / "plan.json", *train, *watched, before=inside)
        while_it_trains(day, program, folder, inside, spantrain, page)
        code, day.told = program.end()
        assert code == 0, day.told
        nothing_is_left(program)
        lone = start("train", folder / "alone.json", *train, "--out", folder / "alone", "--no-network")
        assert lone.end()[0] == 0, lone.said
    day.run, day.alone = (json.loads((folder / name / "run.json").read_text()) for name in ("run", "alone"))
    day.view = json.loads((folder / "run" / "view.json").read_text())
    return day


@contextlib.contextmanager
def browser(day: Day, folder: Path, inside: Sequence[str]) -> Iterator[Any]:
    """An empty page of Chromium at the lab; None, and why, where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        day.without_browser = "playwright is not installed"
    if CHROMIUM is None:
        day.without_browser = "chromium is not installed"
    if day.without_browser:
        yield None
        return
    there = tool(folder, "chromium-there", f'exec {shlex.join([*inside, CHROMIUM])} "$@"')
    with sync_playwright() as tools:
        chromium = tools.chromium.launch(executable_path=there, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1100, "height": 900})
        page.on("pageerror", lambda error: day.troubles.append(str(error)))
        yield page
        chromium.close()


def while_it_trains(
    day: Day, program: Program, folder: Path, inside: list[str], spantrain: Callable[..., str], page: Any
) -> None:
    """Look at its page, kill home's worker, ask who waits for whom, have the office leave."""
    program.wait_to_hear("step 1/")
    address = re.search(r"page: (http://127\.0\.0\.1:\d+/)#(\S+)", "".join(program.said))
    assert address is not None
    if page is not None:
        page.goto(f"{address[1]}#{address[2]}")
        page.wait_for_selector("#main:not([hidden])")
        day.map = page.locator("#map svg").get_attribute("aria-label")

    def view_with_a_recorded_step() -> dict[str, Any]:
        ask = [*inside, sys.executable, "-c", ASK, f"{address[1]}view.json", address[2]]
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            view = json.loads(subprocess.run(ask, capture_output=True, check=True, timeout=PATIENCE_S).stdout)
            if view["reason"] and view["losses"]:
                return view
        raise AssertionError(f"no step was recorded: {view}")

    day.seen = view_with_a_recorded_step()
    workers(folder)["home"].kill()
    program.wait_to_hear("Training goes on")
    if page is not None:
        page.locator("#events li", has_text="home lost").first.wait_for()
        day.shown = page.inner_text("body")
    view_with_a_recorded_step()
    day.why = spantrain("why", "run")
    spantrain("drain", "run", "office")


def test_what_is_there_is_found_and_ready(day):
    assert re.findall(r"address: (\S+)", day.cluster) == ["10.1.0.2", "10.2.0.2", "10.3.0.2"]
    assert re.findall(r"- name: (\S+)\n    network", day.cluster) == list(PLACES)
    assert all(line["verdict"] == "ok" or line["remedy"] for line in day.doctor["lines"])
    assert {line["where"] for line in day.doctor["lines"] if line["check"] == "ports"} >= {"lab->home", "home->office"}


def test_the_page_shows_three_sites_while_they_train(day):
    assert day.seen["state"] == "running"
    assert day.seen["sites"] == list(PLACES)
    assert {device["name"]: device["stage"] is not None for device in day.seen["devices"]} == dict.fromkeys(
        PLACES, True
    )
    assert day.seen["losses"]
    assert any("All devices are ready" in event["text"] for event in day.seen["events"])


def test_a_browser_shows_the_map_and_what_befalls_the_run(day):
    if day.without_browser:
        pytest.skip(day.without_browser)
    assert all(place in day.map for place in PLACES)
    for wanted in ("Step takes", "Sites and links", "lab → office", "Loss", "home lost (its worker was killed"):
        assert wanted in day.shown, wanted
    assert day.troubles == []


def test_why_says_who_waited_for_whom(day):
    assert "Who waited for whom" in day.why
    assert re.search(r"Step \d+ of run took .+; forecast ", day.why)
    assert re.search(r" s to +[\d.]+ s  (lab|office)( -> \w+: forward|: \d)", day.why), day.why


def test_one_is_killed_and_one_leaves_and_all_steps_are_trained_as_on_one_device(day):
    events = " ".join(event["text"] for event in day.view["events"])
    assert "home lost (its worker was killed by signal 9)" in events
    assert events.count("office leaves (asked to by spantrain drain)") == 2, (
        "where it is decided on, and when it is done"
    )
    assert "Device office: its worker ended with status 0; its log: " in day.told
    assert (day.view["state"], day.view["steps_done"]) == ("ended", STEPS)
    assert day.run["losses"] == pytest.approx(day.alone["losses"], abs=1e-3)
    assert day.run["losses"][-1] < day.run["losses"][0]


def test_nothing_is_left(day, folder):
    assert workers(folder) == {}
    left = [path.name for path in (folder / "temporary").iterdir() if not path.name.startswith("torchinductor_")]
    assert left == [], "but torch's own cache"
