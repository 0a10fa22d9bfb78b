"""`spantrain train --page`, `page`, `why`: what a person sees of a run of real processes, in a browser and in words."""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.app.watching.metrics_text import metrics_of_view
from spantrain.app.watching.serve import page_of
from spantrain.app.watching.view import read_view
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from testing.patience import PATIENCE_S
from testing.plans import laptop_plan

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
GRAFANA = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture(scope="module")
def folder(laptop_profile, tmp_path_factory) -> Path:
    """With a plan for four of the laptop preset's devices."""
    folder = tmp_path_factory.mktemp("watched")
    write_profile(laptop_profile, folder / "profile.json")
    reference = reference_to_profile(folder / "profile.json", folder / "plan.json")
    write_plan(replace(laptop_plan(laptop_profile, global_batch=12), profile=reference), folder / "plan.json")
    return folder


def train_words(folder: Path, out: str, *more: str) -> tuple[str, ...]:
    words = ("train", str(folder / "plan.json"), "--out", str(folder / out), "--steps", "6", "--no-network", *more)
    return (sys.executable, "-m", "spantrain", *words)


@pytest.fixture(scope="module")
def run(folder) -> tuple[Path, dict[str, object], str]:
    """A run's folder, what its page gave while it went on, and what it told."""
    train = train_words(folder, "run", "--page")
    process = subprocess.Popen(train, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told, seen = "", {}
    for line in process.stderr:
        told += line
        address = re.search(r"page: (http://127\.0\.0\.1:\d+/)#(\S+)", told)
        if address and "step 1/6" in line:
            request = urllib.request.Request(
                f"{address[1]}view.json", headers={"Authorization": f"Bearer {address[2]}"}
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                seen = json.loads(answer.read())
    assert process.wait(PATIENCE_S) == 0, told
    process.stderr.close()
    return folder / "run", seen, told


def test_the_page_shows_a_run_while_it_goes_on(run):
    _, seen, told = run
    assert seen["state"] == "running", told
    assert seen["model"] == "gpt2-tiny"
    assert {device["name"] for device in seen["devices"]} >= {"lab-0", "home-nano"}


def test_why_tells_who_waited_for_whom_in_the_last_recorded_step(run, spantrain):
    ended = spantrain("why", run[0])
    assert ended.code == 0, ended.err
    assert re.match(r"Step \d of run took ", ended.out)
    assert "Who waited for whom" in ended.out
    assert " -> " in ended.out
    reason = json.loads(spantrain("why", run[0], "--json").out)["reason"]
    spent_s = sum(part["end_s"] - part["start_s"] for part in reason["chain"])
    assert 0 < spent_s <= reason["duration_s"] + 0.05
    known = [part for part in reason["chain"] if part["forecast_s"] is not None]
    assert len(known) > len(reason["chain"]) / 4


def test_a_run_that_loses_a_device_leaves_what_the_others_had_done_of_the_step(folder, spantrain):
    (folder / "faults.json").write_text('[{"after_step": 3, "what": "kill", "device": "home-tx2"}]')
    for attempt in range(3):
        # Where the loss is known before anybody has begun the next step, there is nothing to be told of.
        lost = folder / f"lost-{attempt}"
        words = train_words(folder, lost.name, "--faults", str(folder / "faults.json"), "--on-loss", "end")
        ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert ended.returncode == 1, ended.stderr
        view = read_view(lost)
        assert view.state == "failed"
        assert "home-tx2 was lost" in view.ending
        if view.unfinished is not None:
            break
    assert view.unfinished is not None
    assert view.unfinished.step >= 3
    assert {"lab-0", "office-nx", "office-tx2"} >= view.unfinished.work.keys() > set()
    assert json.loads(spantrain("why", lost, "--json").out)["ending"] == view.ending
    told = spantrain("why", lost)
    assert "was never ended" in told.out, told.err
    assert re.search(r"home-tx2: nothing that anybody knows of", told.out)
    assert re.search(r"lab-0: 0[FBIW]\[", told.out)


def test_what_a_run_has_left_is_whole_and_no_token_is_in_it(run):
    folder, _, told = run
    view = json.loads((folder / "view.json").read_text())
    assert (view["state"], view["steps_done"], len(view["losses"])) == ("ended", 6, 6)
    assert view["timeline"]["work"].keys() == view["timeline"]["work_forecast"].keys()
    token = re.search(r"#(\S+)", told)
    assert token is not None
    assert all(token[1] not in path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_folders_without_a_run_are_refused_by_name(spantrain, tmp_path):
    for command in ("why", "page"):
        assert (spantrain(command, tmp_path / "none").code, spantrain(command, tmp_path).code) == (2, 2)
        assert "train again" in spantrain(command, tmp_path).err
    (tmp_path / "view.json").write_text('{"format": "spantrain-view", "version": 1, "run": 3}')
    assert "view.json" in spantrain("why", tmp_path).err
    assert "belongs to --page" in spantrain("train", "plan.json", "--page-listen", "127.0.0.1:0").err
    assert "--page-listen" in spantrain("train", "plan.json", "--page-listen", "127.0.0.1:0").err


def test_the_dashboard_asks_for_metrics_that_there_are(run):
    dashboard = json.loads(GRAFANA.read_text())
    there = set(re.findall(r"^spantrain_\w+", metrics_of_view((run[0] / "view.json").read_bytes()), re.MULTILINE))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"spantrain_\w+", expr)}
    of_others = {
        name for name in names if name.startswith(("spantrain_worker_", "spantrain_outer_", "spantrain_shard_"))
    }
    assert names - of_others <= there | {"spantrain_eval_loss"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert len(asked) >= 8


@pytest.fixture
def browser_page(run) -> Iterator[object]:
    """The run's page in headless Chromium, at a phone's width and without colours."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with page_of(run[0], "127.0.0.1:0", "--listen") as shown, playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844}, forced_colors="active")
        asked: list[str] = []
        troubles: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(shown.url)
        page.wait_for_selector("#main:not([hidden])")
        yield page, shown.url, asked
        browser.close()
        assert not troubles


def test_a_person_with_a_phone_finds_what_they_look_for(browser_page):
    page, url, asked = browser_page
    text = page.inner_text("body")
    for wanted in (
        "Ended after 6 of 6 steps", "Step takes", "forecast", "Who waits for whom", "Sites and links", "lab → office",
        "Stages and devices", "lab-0", "no part in this plan", "Timeline of step", "Loss", "Events",
        "All devices are ready",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at a phone's width"
    assert page.locator('td[data-label="Planned for"]').count() == 6
    bars = page.locator("#timeline svg[role=img] rect title")
    assert bars.count() > 20
    assert re.match(r"\S+: \d[FBIW]\[", bars.first.text_content())
    assert page.locator("#map svg").get_attribute("aria-label").startswith("Sites ")
    assert page.locator("button, input, form, a[href]").count() == 0, "it controls nothing"
    assert all(one.startswith((url.partition("#")[0], "data:")) for one in asked), "and asks nobody else"
    page.click("#chainhead")
    assert page.locator("#chain li").count() > 5


def test_without_the_token_the_page_says_what_is_missing(browser_page):
    page, url, _ = browser_page
    other = page.context.browser.new_page()
    other.goto(url.partition("#")[0])
    other.wait_for_selector(".say")
    assert "whole address" in other.inner_text("#state")
    assert "lab-0" not in other.inner_text("body")
