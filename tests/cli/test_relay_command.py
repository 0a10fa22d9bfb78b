"""`spantrain relay`: its options, its file of tokens, and a coordinator that is to be reached by one."""

import stat

import pytest

from spantrain.app.relay import relay_tokens

WORDS = ("relay", "--listen", "127.0.0.1:0", "--ports", "7000-7009", "--token-file")


def test_a_file_of_tokens_is_made_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "tokens"
    tokens = relay_tokens(path)
    assert tokens.keys() == {"default"}
    assert len(tokens["default"]) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert relay_tokens(path) == tokens
    path.write_text(f"# of the lab\nlab {'a' * 32}\n\nhome {'b' * 40}\n")
    assert relay_tokens(path) == {"lab": "a" * 32, "home": "b" * 40}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lab short\n", "line 1: wanted NAME TOKEN"),
        (f"lab {'a' * 32}\nhome {'a' * 32}\n", "line 2: wanted NAME TOKEN, each once"),
        (f"lab {'a' * 32} more\n", "line 1: wanted NAME TOKEN"),
        ("# nobody\n", "has 0 tokens, wanted 1 to 64"),
    ],
)
def test_lines_that_are_no_tokens_are_refused_and_not_repeated(spantrain, tmp_path, text, says):
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    ended = spantrain(*WORDS, path)
    assert ended.code == 2
    assert f"Error: {path}" in ended.err
    assert says in ended.err
    assert "aaa" not in ended.err


def test_a_file_that_others_may_read_is_refused(spantrain, tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"lab {'a' * 32}\n")
    path.chmod(0o644)
    assert "others may read it (mode 644)" in spantrain(*WORDS, path).err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ports", "7000"), "--ports 7000: give FIRST-LAST, e.g. 7000-7099"),
        (("--ports", "9-8"), "--ports 9-8: give FIRST-LAST"),
        (("--listen", "192.0.2.1:9000"), "--listen 192.0.2.1:9000: "),
        (("--listen", "unix:/tmp/x"), "--listen unix:/tmp/x: give HOST:PORT"),
        (("--rate", "0 Mbit/s"), "--rate 0 Mbit/s: must be more than nothing"),
    ],
)
def test_what_a_relay_cannot_be_is_said(spantrain, tmp_path, words, says):
    ended = spantrain(*WORDS, tmp_path / "tokens", *words)
    assert ended.code == 2, ended.err
    assert says in ended.err


@pytest.mark.parametrize("listen", [(), ("--listen", "127.0.0.1:0")])
def test_a_coordinator_behind_a_relay_needs_a_port(spantrain, tmp_path, monkeypatch, listen):
    monkeypatch.setenv("SPANTRAIN_RELAY_TOKEN", "r" * 32)
    words = ("profile", "--preset", "laptop", "--model", "gpt2-tiny", "--out", tmp_path / "p")
    ended = spantrain(*words, *listen, "--relay", "127.0.0.1:9000")
    assert ended.code == 2
    assert "--relay: goes with --listen HOST:PORT; PORT and the next must be of the relay's ports, too" in ended.err
