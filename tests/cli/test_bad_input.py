"""Wrong input: exit code 2, one message that says what is wrong and what to do, and nothing written."""

import json
import socket
from pathlib import Path

import pytest

from spantrain.errors import ConfigError

CLUSTER = """\
name: two
sites:
  - name: a
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: a-0, backend: emulated, devices: {tx2: 1}}
  - name: b
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: b-0, backend: emulated, devices: {jetson-nano: 1}}
links:
  - {between: [a, b], bandwidth: 50 Mbit/s, latency: 5 ms}
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("latency: 5 ms", "latncy: 5 ms", ("latncy", "latency")),
        ("jetson-nano: 1", "jetson-nono: 1", ("jetson-nono", "jetson-nano")),
        ("links:\n  - {between: [a, b], bandwidth: 50 Mbit/s, latency: 5 ms}", "links: []", ("a", "b", "no link")),
        ("50 Mbit/s", "-50 Mbit/s", ("-50 Mbit/s", "negative")),
        ("50 Mbit/s", "50 Mbit", ("50 Mbit", "Mbit/s")),
        ("backend: emulated", "backend: tpu", ("tpu", "emulated")),
        ("name: b\n", "name: a\n", ("'a'",)),
        ("name: two", "name: [two", ("cluster.yaml",)),
    ],
    ids=[
        "unknown key",
        "unknown kind",
        "disconnected",
        "negative",
        "no unit",
        "unknown backend",
        "two of a name",
        "not yaml",
    ],
)
def test_cluster_files(old, new, says, refused):
    assert old in CLUSTER
    Path("cluster.yaml").write_text(CLUSTER.replace(old, new))
    refused("profile", "--cluster", "cluster.yaml", "--model", "gpt2-tiny", "--out", "p", says=("cluster.yaml", *says))


PROFILE = ("profile", "--out", "p")
LAPTOP = (*PROFILE, "--preset", "laptop")
QUICK = ("train", "--preset", "laptop", "--out", "run", "--model")
RATES = ("train", "plan.json", "--out", "run", "--learning-rate", "nan")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*PROFILE, "--model", "gpt2-tiny"), ("--preset NAME", "--cluster FILE")),
        ((*LAPTOP, "--cluster", "x.yaml", "--model", "gpt2-tiny"), ("--preset NAME", "--cluster FILE")),
        ((*PROFILE, "--cluster", "x.yaml", "--model", "gpt2-tiny"), ("x.yaml",)),
        ((*PROFILE, "--preset", "labtop", "--model", "gpt2-tiny"), ("labtop", "laptop")),
        ((*LAPTOP, "--model", "gpt2-tiney"), ("gpt2-tiney", "gpt2-tiny")),
        ((*LAPTOP, "--model", "gpt2-tiny", "--dtype", "float8"), ("float8", "bfloat16")),
        ((*LAPTOP, "--model", "gpt2-tiny", "--max-samples", "0"), ("--max-samples",)),
        ((*LAPTOP, "--model", "gpt2-tiny", "--data", "no-such-text"), ("no-such-text",)),
        ((*LAPTOP, "--model", "resnet-tiny", "--data", "."), ("images",)),
        (LAPTOP, ("--model",)),
        ((*LAPTOP, "--model", "gpt2-tiny", "--listen", "nowhere"), ("nowhere", "HOST:PORT")),
        ((*LAPTOP, "--model", "gpt2-tiny", "--modle", "x"), ("--modle", "--model")),
        (("profil",), ("profil",)),
        (("groups", "none.json"), ("none.json", "spantrain profile")),
        (("plan", "none.json", "--global-batch", "64", "--out", "plan.json"), ("none.json", "spantrain profile")),
        (("train", "none.json", "--out", "run"), ("none.json", "spantrain plan")),
        (("train", "--out", "run"), ("plan", "--resume")),
        (("train", "plan.json", "--resume", "run"), ("plan", "--resume")),
        (("train", "plan.json", "--steps", "3"), ("plan.json: there is no such file", "spantrain plan")),
        (("train", "plan.json", "--steps", "0", "--out", "run"), ("--steps",)),
        (("train", "plan.json", "--out", "run", "--network-trace", "drp-50"), ("drp-50", "drop-50")),
        (("train", "plan.json", "--out", "run", "--network-trace", "burst", "--no-network"), ("--no-network",)),
        (("train", "plan.json", "--out", "run", "--lost-after", "soon"), ("--lost-after",)),
        (("train", "plan.json", "--out", "run", "--listen", ":7000", "--lost-after", "1s"), ("at least 2 s",)),
        (("train", "plan.json", "--out", "run", "--standby-coordinator", "a"), ("--standby-coordinator", "--listen")),
        (
            (*QUICK, "gpt2-tiny", "--listen", "127.0.0.1:7000", "--standby-coordinator", "a"),
            ("--standby-coordinator a", "lab-0"),
        ),
        (("worker", "--join", "127.0.0.1:1", "--or-join", "there", "--name", "a"), ("--or-join: 'there'", "HOST:PORT")),
        (("train", "plan.json", "--optimizer", "adamm", "--out", "run"), ("adam", "adamw")),
        (("train", "plan.json", "--lr-schedule", "cos", "--out", "run"), ("cos", "cosine")),
        ((*RATES[:2], "--lr-schedule", "reduce_lr_on_plateau", "--out", "run"), ("follows measured losses",)),
        ((*RATES[:2], "--lr-schedule", "constant", "--warmup-ratio", "0.1", "--out", "run"), ("constant_with_warmup",)),
        ((*RATES[:2], "--warmup-steps", "1", "--warmup-ratio", "0.1", "--out", "run"), ("give one",)),
        ((*RATES[:2], "--lr-schedule-option", "num_cycles", "--out", "run"), ("NAME=VALUE",)),
        (("train", "plan.json", "--learning-rate", "-1", "--out", "run"), ("learning_rate", "-1")),
        ((*RATES, "--weight-decay", "inf", "--max-grad-norm", "nan"), ("learning_rate", "nan", "weight_decay", "norm")),
        ((*QUICK, "gpt2-tiny", "--emulated-speed", "nan"), ("--emulated-speed", "between 1e-6 and 1e6", "nan")),
        (("compare", *QUICK[1:], "gpt2-tiny", "--network-speed", "inf"), ("--network-speed", "between 1e-6 and 1e6")),
        (("train", "--resume", "run"), ("run", "checkpoint")),
        (("train", "--model", "gpt2-tiny"), ("--preset NAME", "--cluster FILE")),
        (("train", "plan.json", "--model", "gpt2-tiny"), ("plan", "--model")),
        (("train", "plan.json", "--preset", "laptop", "--out", "run"), ("--preset", "--model")),
        ((*QUICK, "gpt2-tiney"), ("gpt2-tiney", "gpt2-tiny")),
        ((*QUICK, "gpt2-tiny", "--dtype", "half"), ("half", "float16")),
        ((*QUICK, "gpt2-tiny", "--data", "nowhere.py:samples"), ("nowhere.py", "FILE.py:FUNCTION")),
        ((*QUICK, "gpt2-tiny", "--data", "images:."), ("reads text", "images")),
        ((*QUICK, "gpt2-tiny", "--tokenizer", "."), ("tokenizer.json",)),
        ((*QUICK, "gpt2-tiny", "--global-batch", "0"), ("--global-batch",)),
        ((*QUICK, "gpt2-tiny", "--schedule", "1f1"), ("1f1", "1f1b")),
        ((*QUICK, "nowhere.py:build"), ("nowhere.py",)),
        ((*QUICK, "nowhere.py"), ("nowhere.py", "FILE.py:FUNCTION")),
        (("worker", "--join", "127.0.0.1:1"), ("--name",)),
        (("worker", "--join", "127.0.0.1:1", "--name", "a"), ("SPANTRAIN_TOKEN", "--token-file")),
        (("worker", "--join", "127.0.0.1:1", "--token-file", "nowhere", "--name", "a"), ("nowhere", "token")),
        (("worker", "--join", "127.0.0.1:1", "--token", "x", "--name", "a"), ("--token",)),
    ],
)
def test_options(words, says, refused):
    refused(*words, says=says)


@pytest.mark.parametrize(("join", "says"), [("127.0.0.1:1", "token"), ("here", "HOST:PORT")])
def test_a_mistyped_invitation(join, says, refused, tmp_path):
    file = tmp_path / "token"
    file.write_text("x\n")
    refused("worker", "--join", join, "--token-file", file, "--name", "a", says=(says,))


FACTORIES = """\
import sys

from torch import nn, zeros


def raises():
    raise UserWarning("no weights today")


def leaves():
    sys.exit(7)


def nonsense():
    return 3


def frozen():
    return nn.Linear(8, 4).requires_grad_(False), zeros(2, 8)


def short():
    return nn.Linear(8, 4).half(), zeros(2, 8)
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", ("UserWarning: no weights today", "w.py:7 in raises")),
        ("leaves", ("SystemExit: 7", "w.py:11 in leaves")),
        ("nonsense", ("returned int", "wanted (module, batch)")),
        ("frozen", ("nothing to train",)),
        ("short", ("weight is float16", "wanted float32", "--dtype")),
        ("missing", ("no function missing",)),
    ],
)
def test_factories_that_will_not_do_are_refused_before_anything_is_started(refused, name, says):
    Path("w.py").write_text(FACTORIES)
    refused(*QUICK, f"w.py:{name}", says=("w.py", *says))
    refused(*LAPTOP, "--model", f"w.py:{name}", says=("w.py", *says))


def test_files_in_the_place_of_others(refused, profile_path):
    """A profile where a plan is wanted, and the other way; text; half a file; an artefact of tomorrow."""
    content = json.loads(profile_path.read_text())
    Path("text.json").write_text("no JSON at all")
    Path("half.json").write_text(profile_path.read_text()[:1000])
    Path("tomorrow.json").write_text(json.dumps({**content, "version": 99}))
    Path("foreign.json").write_text(json.dumps({**content, "format": "spantrain-plan"}))
    Path("more.json").write_text(json.dumps({**content, "colour": "red"}))
    refused("train", profile_path, "--out", "run", says=("spantrain-profile", "spantrain-plan"))
    for name, says in {"text": "JSON", "half": "JSON", "tomorrow": "99", "foreign": "plan", "more": "colour"}.items():
        refused("groups", f"{name}.json", says=(f"{name}.json", says))
        refused("plan", f"{name}.json", "--global-batch", "64", "--out", "q/plan.json", says=(f"{name}.json", says))
    refused("groups", ".", says=("folder", "half.json"))


def test_plans_that_cannot_be(refused, profile_path, tight_profile_path):
    wanted = ("--global-batch", "64", "--out", "q/plan.json")
    refused("plan", tight_profile_path, *wanted, says=("MiB", "gpt2-tiny"))
    refused("plan", profile_path, "--global-batch", "0", "--out", "plan.json", says=("--global-batch",))
    refused("plan", profile_path, *wanted, "--schedule", "critical", says=("'critical'", "critical-path"))
    refused("plan", profile_path, *wanted, "--optimizer", "adamm", says=("adamm", "adamw"))
    refused("plan", profile_path, *wanted, "--leave-out", "lab0", says=("lab0", "lab-0"))
    everything = ("lab", "office", "home")
    refused("plan", profile_path, *wanted, *(w for s in everything for w in ("--leave-out", s)), says=("device",))


def test_runs_that_cannot_be(refused, plan_path, tmp_path):
    run = ("train", plan_path, "--steps", "1", "--out", "run")
    refused(*run, "--schedule", "1f1", says=("1f1", "1f1b"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(*run, "--listen", f"127.0.0.1:{port}", says=(str(port), "in use"))
    content = json.loads(plan_path.read_text())
    (tmp_path / "alone.json").write_text(json.dumps({**content, "profile": None}))
    refused("train", tmp_path / "alone.json", "--out", "run", says=("profile", "spantrain plan"))
    moved = {**content["profile"], "path": "gone.json"}
    (tmp_path / "moved.json").write_text(json.dumps({**content, "profile": moved}))
    refused("train", tmp_path / "moved.json", "--out", "run", says=("gone.json", "put it back"))
    changed = {**content["profile"], "sha256": "0" * 64}
    (tmp_path / "changed.json").write_text(json.dumps({**content, "profile": changed}))
    refused("train", tmp_path / "changed.json", "--out", "run", says=("is not the profile",))


def test_a_run_needs_a_folder(refused, plan_path):
    refused("train", plan_path, says=("--out FOLDER",))


PLAN = ("plan", "--preset", "laptop", "--model", "gpt2-tiny", "--global-batch", "8")


def test_data_that_cannot_be_read_is_refused_before_anything_is_planned(refused):
    Path("bad.jsonl").write_text('{"text": "a"}\nno json\n')
    Path("short.txt").write_text("abc")
    refused(*PLAN, "--data", "bad.jsonl", says=("bad.jsonl, line 2: is not valid JSON",))
    refused(*PLAN, "--data", "short.txt", says=("short.txt: too short",))
    refused(*LAPTOP, "--model", "gpt2-tiny", "--data", "bad.jsonl", says=("bad.jsonl, line 2",))


@pytest.mark.parametrize(
    "place", ["/proc/new/plan.json", "/dev/null", "/sys/plan.json", "x" * 300 + "/plan.json", "there"]
)
def test_files_that_cannot_be_written_are_refused_before_anything_is_planned(refused, monkeypatch, place):
    """Where permissions say that one may, too; and what is no file is not replaced by one."""
    Path("there").mkdir()
    monkeypatch.setattr("spantrain.planner.engine.engine.make_plan", lambda *_: pytest.fail("it was planned for"))
    refused(
        *PLAN, "--out", place, says=(f"--out {place[:60]}", "name" if place in ("there", "/dev/null") else "choose")
    )


def test_what_was_planned_is_shown_though_it_cannot_be_written(spantrain, profile_path, tmp_path, monkeypatch):
    def full(*_args, **_more) -> None:
        raise ConfigError(f"{tmp_path}/plan.json: cannot be written: No space left on device; choose another place")

    monkeypatch.setattr("spantrain.app.planning.plan_files.write_plan", full)
    ended = spantrain("plan", profile_path, "--global-batch", 8, "--out", tmp_path / "plan.json")
    assert ended.code == 2
    assert "stage 0" in ended.out
    assert "No space left on device" in ended.err


def test_a_run_does_not_begin_where_its_files_have_no_place(refused, plan_path):
    for name in ("run.json", "checkpoint"):
        folder = Path(name + "-run")
        folder.mkdir()
        (folder / name).mkdir() if name == "run.json" else (folder / name).write_text("")
        refused("train", plan_path, "--out", folder, says=(f"--out {folder}", "move it away"))


def test_places_that_cannot_be_written(refused, profile_path, plan_path):
    Path("file").write_text("")
    refused(*PROFILE[:1], "--preset", "laptop", "--model", "gpt2-tiny", "--out", "file", says=("--out", "is a file"))
    refused("plan", profile_path, "--global-batch", "64", "--out", "file/plan.json", says=("--out", "is a file"))
    refused("plan", profile_path, "--global-batch", "64", "--out", ".", says=("folder",))
    refused("train", plan_path, "--out", "file/run", says=("--out", "is a file"))
    refused("train", plan_path, "--out", "run", "--report-to", "comet", says=("report_to", "comet", "tensorboard"))
    refused("demo", "--out", "file", says=("--out", "is a file"))
