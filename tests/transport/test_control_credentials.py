"""A coordinator that keeps who it is, names that are taken over, and calls that are not waited for."""

import base64
import json
import threading
from pathlib import Path

import pytest

from spantrain.config.files.text_files import read_private, write_atomically
from spantrain.errors import PeerLostError, UsageError
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.credentials import Credentials
from spantrain.transport.control.protocol import RemoteRefusal
from spantrain.transport.control.server import ControlServer
from testing.patience import PATIENCE_S


def server(folder: Path, credentials: Credentials, *, replacing: bool = False) -> ControlServer:
    made = ControlServer(
        bind=f"unix:{folder}/join",
        handlers={"who": lambda peer, _payload: {"peer": peer}},
        on_join=lambda _name, _facts: {},
        credentials=credentials,
        may_replace=lambda _held, _by: replacing,
    )
    made.start()
    return made


def join(of: ControlServer, token: str, name: str = "edge-1") -> ControlClient:
    return ControlClient.join(of.join_address, token, name=name, facts={}, timeout_s=PATIENCE_S)


def test_a_coordinator_that_starts_again_is_the_same_to_who_has_its_token(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    first = server(tmp_path, Credentials.kept_in(path))
    token = first.token
    before = join(first, token)
    first.stop(0.1)
    second = server(tmp_path, Credentials.kept_in(path))
    try:
        assert second.token == token
        with pytest.raises(RemoteRefusal, match="not a member of this run any more"):
            before.call("who", {}, timeout_s=PATIENCE_S)
        again = join(second, token)
        assert again.call("who", {}, timeout_s=PATIENCE_S) == {"peer": "edge-1"}
        again.close()
    finally:
        before.close()
        second.stop(0.1)


def test_a_key_of_an_unknown_algorithm_is_refused_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    Credentials.kept_in(path)
    kept = json.loads(path.read_text())
    lines = kept["authority_key"].splitlines()
    code = bytearray(base64.b64decode("".join(lines[1:-1])))
    curve = bytes((0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x03, 0x01, 0x07))  # prime256v1
    code[code.index(curve) + len(curve) - 1] = 0x7F
    kept["authority_key"] = "\n".join((lines[0], base64.b64encode(code).decode(), lines[-1], ""))
    path.write_text(json.dumps(kept))
    with pytest.raises(UsageError, match=r"credentials.json: holds no credentials .* is not known here"):
        Credentials.kept_in(path)


def test_who_joins_last_has_the_name_where_that_is_allowed(tmp_path: Path) -> None:
    credentials = Credentials.create()
    made = server(tmp_path, credentials, replacing=True)
    try:
        first, second = join(made, made.token), join(made, made.token)
        with pytest.raises(RemoteRefusal, match="not a member"):
            first.call("who", {}, timeout_s=PATIENCE_S)
        assert second.call("who", {}, timeout_s=PATIENCE_S) == {"peer": "edge-1"}
        assert made._members.names == ("edge-1",)
        first.close()
        second.close()
    finally:
        made.stop(0.1)


def test_a_call_that_is_begun_says_when_it_has_ended(tmp_path: Path) -> None:
    made = server(tmp_path, Credentials.create())
    client = join(made, made.token)
    ended = threading.Event()
    call = client.begin("who", {}, timeout_s=PATIENCE_S, done=ended.set)
    assert ended.wait(PATIENCE_S)
    assert call.ended
    assert call.result() == {"peer": "edge-1"}
    made.stop(0.1)
    waiting = client.begin("who", {}, timeout_s=PATIENCE_S)
    client.close()
    with pytest.raises(PeerLostError):
        waiting.result()
    with pytest.raises(PeerLostError, match="is closed"):
        client.begin("who", {}, timeout_s=PATIENCE_S)


def test_joining_is_given_up_when_it_is_cancelled(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(PeerLostError, match="no coordinator answers"):
        ControlClient.join(
            f"unix:{tmp_path}/join", Credentials.create().token.text, name="a", facts={}, timeout_s=1e6,
            cancelled=cancelled,
        )  # fmt: skip


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"token": "st1x"}', "cut", "other token"])
def test_damaged_credentials_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "credentials.json"
    kept = Credentials.kept_in(path)
    text = path.read_text()
    if damage == "cut":
        damage = text.replace("BEGIN PRIVATE", "BEGIN")
    elif damage == "other token":
        damage = text.replace(kept.token.text, Credentials.create().token.text)
    write_atomically(path, damage, private=True)
    with pytest.raises(UsageError, match="holds no credentials of a coordinator"):
        Credentials.kept_in(path)


def test_private_files_are_their_owner_s(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert read_private(path) is None
    write_atomically(path, "one", private=True)
    write_atomically(path, "two", private=True)
    assert read_private(path) == "two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["secret"]
    path.chmod(0o640)
    with pytest.raises(UsageError, match="others may read it"):
        read_private(path)
    with pytest.raises(UsageError, match="cannot be written"):
        write_atomically(tmp_path / "no" / "secret", "x", private=True)
    assert "BEGIN" not in repr(Credentials.create().identity)
