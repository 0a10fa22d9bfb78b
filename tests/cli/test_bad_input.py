"""Wrong input: exit code 2, one message that says what is wrong and what to do, and nothing written."""

import json
import socket
from pathlib import Path

import pytest

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


@pytest.fixture
def refused(spantrain, tmp_path, monkeypatch):
    """Run in an empty folder; check that the program refuses in one message and writes nothing; return the message."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: object, says: tuple[str, ...]) -> str:
        before = sorted(folder.rglob("*"))
        ended = spantrain(*words)
        assert ended.code == 2, ended.err
        assert ended.out == ""
        assert ended.err.count("Error") == 1, ended.err
        assert "Traceback" not in ended.err
        plain = " ".join(ended.err.replace("│", " ").split())
        for text in says:
            assert text in plain, plain
        assert sorted(folder.rglob("*")) == before, "nothing was written"
        return plain

    return run


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*PROFILE, "--model", "gpt2-tiny"), ("--preset NAME", "--cluster FILE")),
        ((*LAPTOP, "--cluster", "x.yaml", "--model", "gpt2-tiny"), ("--preset NAME", "--cluster FILE")),
        ((*PROFILE, "--cluster", "x.yaml", "--model", "gpt2-tiny"), ("x.yaml",)),
        ((*PROFILE, "--preset", "labtop", "--model", "gpt2-tiny"), ("labtop", "laptop")),
        ((*LAPTOP, "--model", "gpt2-tiney"), ("gpt2-tiney", "gpt2-tiny")),
        ((*LAPTOP, "--model", "gpt2-tiny", "--dtype", "float16"), ("float16", "bfloat16")),
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
        (("train", "plan.json", "--steps", "3"), ("--out",)),
        (("train", "plan.json", "--steps", "0", "--out", "run"), ("--steps",)),
        (("train", "plan.json", "--optimizer", "adam", "--out", "run"), ("adam", "adamw")),
        (("train", "plan.json", "--lr-schedule", "cos", "--out", "run"), ("cos", "cosine")),
        (("train", "plan.json", "--learning-rate", "-1", "--out", "run"), ("learning_rate", "-1")),
        (("train", "--resume", "run"), ("run", "checkpoint")),
        (("worker", "--join", "127.0.0.1:1", "--token", "x"), ("--name",)),
        (("worker", "--join", "127.0.0.1:1", "--token", "x", "--name", "a"), ("token",)),
        (("worker", "--join", "here", "--token", "x", "--name", "a"), ("here", "HOST:PORT")),
    ],
)
def test_options(words, says, refused):
    refused(*words, says=says)


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
    refused("plan", profile_path, *wanted, "--optimizer", "adam", says=("adam", "adamw"))
    refused("plan", profile_path, *wanted, "--leave-out", "lab0", says=("lab0", "lab-0"))
    everything = ("lab", "office", "home")
    refused("plan", profile_path, *wanted, *(w for s in everything for w in ("--leave-out", s)), says=("device",))


@pytest.fixture
def plan_path(spantrain, profile_path, tmp_path) -> Path:
    path = tmp_path / "plan.json"
    assert spantrain("plan", profile_path, "--global-batch", "64", "--out", path).code == 0
    return path


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


def test_places_that_cannot_be_written(refused, profile_path, plan_path):
    Path("file").write_text("")
    refused(*PROFILE[:1], "--preset", "laptop", "--model", "gpt2-tiny", "--out", "file", says=("--out", "is a file"))
    refused("plan", profile_path, "--global-batch", "64", "--out", "file/plan.json", says=("--out", "is a file"))
    refused("plan", profile_path, "--global-batch", "64", "--out", ".", says=("folder",))
    refused("train", plan_path, "--out", "file/run", says=("--out", "is a file"))
    refused("train", plan_path, "--out", "run", "--tensorboard", "file", says=("--tensorboard", "is a file"))
    refused("demo", "--out", "file", says=("--out", "is a file"))
