"""`spantrain schedule show` and `check`: timeline, figures, picture, order; without torch."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from testing.patience import PATIENCE_S

EVEN = ("--stages", 4, "--micro-batches", 6)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_timeline_and_figures(spantrain) -> None:
    ended = spantrain("schedule", "show", "zb-h1", *EVEN)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1:] == [
        "21 s, 1.000 times the lower bound of 21 s",
        "",
        "d0  FFFF...BBFBBFBBBBBBBB",
        "d1  .FFF..IFIWFIWFIWIWIWW",
        "d2  ..FF.IFIFIWFIWFIWIWWW",
        "d3  ...FIFIFIFIWFIWFIWWWW",
        "    0 s to 21 s, 1 s a cell",
        "",
        "stage  bubble  most samples held",
        "0       14.3%  d0 4",
        "1       14.3%  d1 4",
        "2       14.3%  d2 4",
        "3       14.3%  d3 4",
    ]


def test_links_and_limits_count(spantrain) -> None:
    words = ("schedule", "show", "1f1b", *EVEN, "--transfer", 1, "--latency", 0.5)
    free = json.loads(spantrain(*words, "--json").out)
    tight = json.loads(spantrain(*words, "--in-flight", 2, "--json").out)
    assert free["peak_samples"] == {"d0": 4, "d1": 3, "d2": 2, "d3": 1}
    assert tight["peak_samples"] == {"d0": 2, "d1": 2, "d2": 2, "d3": 1}
    assert tight["step_s"] > free["step_s"] > free["lower_bound_s"]
    assert free["ratio_to_bound"] == pytest.approx(free["pipeline_s"] / free["lower_bound_s"])
    assert len(free["bubble_ratio"]) == 4
    assert free["orders"][3][0][:2] == ["3F[0:1]", "3B[0:1]"]


def test_the_picture_as_png(spantrain) -> None:
    image_of = pytest.importorskip("PIL.Image", reason="Pillow draws PNG pictures; pip install 'spantrain[plot]'").open
    ended = spantrain("schedule", "show", "gpipe", *EVEN, "--png", "pictures/order.png", "--svg", "order.svg")
    assert ended.code == 0, ended.err
    with image_of("pictures/order.png") as image:
        assert image.format == "PNG"
        _, _, width, height = map(float, ElementTree.parse("order.svg").getroot().attrib["viewBox"].split())
        assert image.size == (2 * width, 2 * height)
        colours = {colour for _, colour in image.convert("RGB").getcolors(100_000)}
    # Forward, backward and the empty row.
    assert {(0x4C, 0x9B, 0xE8), (0xE8, 0x89, 0x4C), (0xF2, 0xF2, 0xF2)} <= colours


def test_png_without_pillow_says_what_to_install(spantrain, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.ImageDraw", None)
    ended = spantrain("schedule", "show", "gpipe", *EVEN, "--png", "order.png")
    assert (ended.code, ended.out) == (2, "")
    assert "spantrain[plot]" in ended.err
    assert not Path("order.png").exists()


def test_picture_and_order_files(spantrain) -> None:
    ended = spantrain("schedule", "show", "compact", *EVEN, "--svg", "a/b.svg", "--order", "order.txt")
    assert ended.code == 0, ended.err
    assert ElementTree.parse("a/b.svg").getroot().tag.endswith("svg")
    assert spantrain("schedule", "check", "order.txt").out == "order.txt: 66 actions of 4 stages can run\n"


@pytest.fixture
def plan_path(spantrain, profile_path, tmp_path) -> Path:
    path = tmp_path / "plan.json"
    assert spantrain("plan", profile_path, "--global-batch", 16, "--no-interleaving", "--out", path).code == 0
    return path


def test_a_plan_with_its_profile(spantrain, plan_path) -> None:
    plan = json.loads(plan_path.read_text())
    shown = json.loads(spantrain("schedule", "show", "critical-path", "--plan", plan_path, "--json").out)
    assert shown["step_s"] == pytest.approx(plan["prediction"]["step_s"])
    assert shown["pipeline_s"] >= shown["lower_bound_s"] * (1 - 1e-9)
    assert len(shown["orders"]) == len(shown["bubble_ratio"]) == len(plan["stages"])
    text = spantrain("schedule", "show", "gpipe", "--plan", plan_path, "--order", "order.txt").out
    assert "of it" in text
    assert all(device in text for device in shown["peak_samples"])
    assert spantrain("schedule", "check", "order.txt", "--plan", plan_path).code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "zbh1", *EVEN), "did you mean zb-h1?"),
        (("show", "zb"), "give --stages and --micro-batches"),
        (("show", "zb", "--stages", 4), "give --micro-batches"),
        (("show", "zb", *EVEN, "--plan", "plan.json"), "--stages, --micro-batches: the plan says that"),
        (("show", "zb", "--plan", "plan.json"), "plan.json: there is no such file"),
        (("show", "zb", *EVEN, "--transfer", -1), "transfer_s must be a number from 0 to 1e+06, got -1.0"),
        (("show", "zb", *EVEN, "--latency", "nan"), "latency_s must be a number from 0 to 1e+06, got nan"),
        (("show", "zb", *EVEN, "--in-flight", 0), "in_flight must be at least 1 micro-batch, got 0"),
        (("show", "zb", *EVEN, "--svg", "."), "--svg .: is a folder"),
        (("check", "none.txt"), "none.txt: there is no such file; write one with"),
    ],
)
def test_wrong_input_is_refused_and_nothing_written(words, says, spantrain, tmp_path) -> None:
    ended = spantrain("schedule", *words)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("stage 0 replica 0: 0F[0:2]", "order.txt: stage 0, replica 0: span [0:2] has no backward_input"),
        ("stage 0 replica 0: 0F[0:2] 0B[0:2]\nstage 1 replica 0: 1B[0:2] 1F[0:2]", "1B[0:2] waits for forward of"),
        (
            "stage 0 replica 0: 0F[0:2] 0B[0:2]\nstage 0 replica 1: 0F[1:3] 0B[1:3]",
            "0F[1:3]: another replica of the stage has done some of its samples",
        ),
        ("stage 0 replica 0: 0X[0:2]", "order, line 1: not an action: '0X[0:2]'"),
    ],
)
def test_orders_that_cannot_run_are_named(order, says, spantrain) -> None:
    Path("order.txt").write_text(order)
    ended = spantrain("schedule", "check", "order.txt")
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, spantrain.cli.main as program\n"
        "words = 'schedule show zb --stages 3 --micro-batches 4 --svg x.svg'.split()\n"
        "try:\n    program.main(words)\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert Path("x.svg").is_file()


def test_several_stages_on_each_device(spantrain) -> None:
    ended = spantrain("schedule", "show", "zb-v", "--stages", 3, "--chunks", 2, "--back", "--micro-batches", 4)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-4:] == [
        "stage  bubble  most samples held",
        "0, 5     7.7%  d0 5",
        "1, 4     7.7%  d1 6",
        "2, 3     7.7%  d2 6",
    ]
    words = ("schedule", "show", "critical-path", "--stages", 3, "--chunks", 2, "--micro-batches", 4, "--in-flight", 2)
    shown = json.loads(spantrain(*words, "--json", "--order", "order.txt").out)
    assert max(shown["peak_samples"].values()) <= 4, "two stages' worth of two micro-batches"
    assert {text[0] for text in shown["orders"][0][0]} == {"0", "3"}
    assert spantrain("schedule", "check", "order.txt").code == 0
    plain = spantrain("schedule", "show", "1f1b", "--stages", 3, "--chunks", 2, "--micro-batches", 4)
    assert plain.code == 2
    assert "1f1b has no order for devices with several stages; give --schedule with one of" in plain.err
    back = spantrain("schedule", "show", "zb-v", "--stages", 3, "--back", "--micro-batches", 4)
    assert back.code == 2
    assert "give --chunks 2" in back.err
