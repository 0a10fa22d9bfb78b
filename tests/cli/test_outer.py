"""`spantrain outer`: help without a file, placement, becoming a command, wrong input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testing.patience import PATIENCE_S

CONFIG = """\
name: two-places
master: {address: "127.0.0.1:29500", state: state/master}
shards:
  - {name: s0, address: "127.0.0.1:29510", snapshots: state/s0}
  - {name: s1, address: "127.0.0.1:29511", snapshots: state/s1}
inner_steps: 16
"""
PLACES = """\
placement:
  model: 500 MB
  clusters:
    - {name: a, tokens_per_s: 1000}
    - {name: b, tokens_per_s: 1000}
  places:
    - {name: near-a, bandwidth: {a: 10 Gbit/s, b: 8 Mbit/s}}
    - {name: between, bandwidth: {a: 100 Mbit/s, b: 100 Mbit/s}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "outer.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def token(config: Path) -> str:
    """A token in the folder where the master keeps it."""
    from spantrain.transport.control.credentials import JoinToken

    text = JoinToken.create(b"a certificate").text
    folder = config.parent / "state" / "master"
    folder.mkdir(parents=True)
    (folder / "token").write_text(text + "\n")
    return text


def program(*words: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spantrain", "outer", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **options,
    )


def test_without_words_it_explains_itself(spantrain) -> None:
    ended = spantrain("outer")
    said = ended.out + ended.err
    for verb in ("demo", "up", "master", "shard", "run", "status", "place"):
        assert f" {verb} " in said
    assert "docs/outer.md" in said


def test_place_says_where_and_why(spantrain, config) -> None:
    config.write_text(CONFIG + PLACES)
    shown = spantrain("outer", "place", config)
    assert shown.code == 0
    assert "between" in shown.out
    assert "weighted by throughput" in shown.out
    found = json.loads(spantrain("outer", "place", config, "--json").out)
    assert found["places"] == {"s0": "between", "s1": "between"}
    assert [score["place"] for score in found["single"]] == ["between", "near-a"]
    assert found["exchange_s"] == {"a": 80.0, "b": 80.0}


def test_place_needs_places(spantrain, config) -> None:
    ended = spantrain("outer", "place", config)
    assert ended.code == 2
    assert "has no placement section" in ended.err


def test_place_refuses_a_model_that_no_machine_holds(spantrain, config) -> None:
    config.write_text(CONFIG + PLACES.replace("model: 500 MB", "model: 100000000000000000000 MB"))
    ended = spantrain("outer", "place", config)
    assert (ended.code, ended.out) == (2, "")
    assert "no machine holds" in ended.err


def test_run_becomes_the_command(config, token) -> None:
    code = (
        "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'OUTER' in k})); raise SystemExit(7)"
    )
    ended = program("run", config, "--cluster", "a", "--", sys.executable, "-c", code)
    assert ended.returncode == 7, ended.stderr
    assert json.loads(ended.stdout) == {
        "SPANTRAIN_OUTER_MASTER": "127.0.0.1:29500",
        "SPANTRAIN_OUTER_TOKEN": token,
        "SPANTRAIN_OUTER_CLUSTER": "a",
        "SPANTRAIN_OUTER_INNER_STEPS": "16",
        "SPANTRAIN_OUTER_ENCRYPTED": "1",
    }


def test_run_takes_the_token_from_a_file_that_is_named(config, token, tmp_path) -> None:
    other = tmp_path / "token-of-mine"
    (config.parent / "state" / "master" / "token").rename(other)
    code = "import os; print(os.environ['SPANTRAIN_OUTER_TOKEN'])"
    words = ("run", config, "--cluster", "a", "--token-file", other, "--", sys.executable, "-c", code)
    assert program(*words).stdout.strip() == token


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "CONFIG", "--cluster", "a", "--", "no-such-command"), "start the master first"),
        (("run", "CONFIG", "--cluster", "a", "--token", "st1abc", "--", "true"), "cut or mistyped"),
        (("run", "none.yaml", "--cluster", "a", "--", "true"), "there is no such file"),
        (("run", "CONFIG", "--", "true"), "--cluster"),
        (("run", "CONFIG", "--cluster", "", "--", "true"), "--cluster: '' is no cluster's name"),
        (("run", "CONFIG", "--cluster", "s0", "--", "true"), "--cluster: 's0' is no cluster's name"),
        (("run", "CONFIG", "--cluster", "a/w1", "--", "true"), "--cluster: 'a/w1' is no cluster's name"),
    ],
)
def test_wrong_input_is_told(spantrain, config, monkeypatch, words, says) -> None:
    monkeypatch.delenv("SPANTRAIN_OUTER_TOKEN", raising=False)
    ended = spantrain("outer", *(config if word == "CONFIG" else word for word in words))
    assert ended.code == 2
    assert says in ended.err


def test_a_command_that_is_not_there_is_named(spantrain, config, token) -> None:
    ended = spantrain("outer", "run", config, "--cluster", "a", "--", "no-such-command")
    assert ended.code == 2
    assert "no-such-command: there is no such command" in ended.err
