"""`spantrain worker`: what it takes from options, variables, torchrun and the way to the coordinator."""

import os
from collections.abc import Callable

import pytest
import torch

from spantrain.app import worker as use_case
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.transport.control.credentials import JoinToken

TOKEN = JoinToken.create(b"a certificate").text
JOIN = ("worker", "--join", "127.0.0.1:7000")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.fixture
def started(spantrain, monkeypatch) -> Callable[..., WorkerSettings]:
    """Run the program up to where the worker would begin; return what it was to begin with."""
    found: list[WorkerSettings] = []

    class Noted:
        def __init__(self, settings: WorkerSettings) -> None:
            found.append(settings)

        def run(self) -> None: ...

        def stop(self) -> bool: ...

        def leave(self, why: str) -> bool: ...

    monkeypatch.setattr(use_case, "Worker", Noted)
    monkeypatch.setenv("SPANTRAIN_TOKEN", TOKEN)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")

    def run(*words: object, **variables: str) -> WorkerSettings:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        ended = spantrain(*words)
        assert ended.code == 0, ended.err
        return found.pop()

    return run


def test_address_and_token_may_be_in_variables(started, caplog):
    caplog.set_level("INFO")
    settings = started("worker", "--name", "lab-0", SPANTRAIN_JOIN="127.0.0.1:7000", SPANTRAIN_TOKEN=TOKEN)
    assert (settings.join, settings.token, settings.name) == ("127.0.0.1:7000", TOKEN, "lab-0")
    assert "lab-0 looks for the coordinator at 127.0.0.1:7000, for 600 s at most" in caplog.messages


def test_others_reach_it_where_the_way_to_the_coordinator_begins_or_where_that_is_said(started):
    assert started(*JOIN, "--name", "a").data_address == "127.0.0.1"
    assert started(*JOIN, "--name", "a", "--data-address", "10.0.0.7").data_address == "10.0.0.7"


def test_it_listens_at_an_address_of_its_own_wherever_others_reach_it(started):
    """Behind address translation its machine has not got that address; a name of its own may stand for its loopback."""
    for told, listens in (("127.0.0.1", ""), ("192.0.2.7", "127.0.0.1"), ("localhost", "127.0.0.1")):
        settings = started(*JOIN, "--name", "a", "--data-address", told)
        assert (settings.data_address, settings.listen_address) == (told, listens)
    assert started("worker", "--join", "[::1]:7000", "--name", "a").data_address == "::1"


def test_replicas_meet_at_that_address_or_on_the_interface_that_is_said(started):
    for words in ((), ("--data-address", "127.0.0.1"), ("--data-address", "192.0.2.7")):  # the last is nobody's
        started(*JOIN, "--name", "a", *words, GLOO_SOCKET_IFNAME="")
        assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    started(*JOIN, "--name", "a", GLOO_SOCKET_IFNAME="eth7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_address_of_an_interface_is_listened_on(started, spantrain):
    assert started("worker", "--join", "10.0.0.1:7000", "--name", "a", "--interface", "lo").data_address == "127.0.0.1"
    ended = spantrain(*JOIN, "--name", "a", "--interface", "wg7")
    assert ended.code == 2
    assert "Error: --interface wg7: has no IPv4 address here; there are " in ended.err
    assert "lo (127.0.0.1)" in ended.err
    ended = spantrain(*JOIN, "--name", "a", "--interface", "lo", "--data-address", "10.0.0.7")
    assert (ended.code, ended.err.strip()) == (
        2, "Error: --interface lo: its address is the one to listen on; no --data-address"
    )  # fmt: skip


def test_a_relay_has_its_token_in_a_variable(started, spantrain, monkeypatch):
    relay = ("--name", "a", "--relay", "relay.example.org:9000")
    found = started(*JOIN, *relay, SPANTRAIN_RELAY_TOKEN="r" * 32).relay
    assert (str(found.address), found.token) == ("relay.example.org:9000", "r" * 32)
    assert "rrr" not in repr(found)
    for words, says in (
        ((*relay, "--insecure"), "--relay: takes only what is encrypted; leave out --insecure"),
        (("--name", "a", "--relay", "nowhere"), "--relay: 'nowhere' is not an address: write HOST:PORT"),
        (("--name", "a", "--relay", "nowhere:0"), "--relay nowhere:0: give HOST:PORT, where `spantrain relay` listens"),
    ):
        ended = spantrain(*JOIN, *words)
        assert ended.code == 2
        assert says in ended.err
    for token, says in (("short", "SPANTRAIN_RELAY_TOKEN is cut"), ("", "give the relay's token in SPANTRAIN_RELAY")):
        monkeypatch.setenv("SPANTRAIN_RELAY_TOKEN", token)
        ended = spantrain(*JOIN, *relay)
        assert ended.code == 2
        assert says in ended.err


def test_under_torchrun_it_has_the_rank_for_a_name_and_the_local_ranks_device(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = started(*JOIN, **TORCHRUN)
    assert (settings.name, settings.backend) == ("rank-3", "cuda:1")
    assert started(*JOIN, "--name", "lab-0").name == "lab-0"


def test_it_may_call_the_functions_that_it_is_started_with(started):
    words = ("--name", "a", "--model", "m.py:build", "--function", "d.py:data", "--function", "d.py:loss")
    assert set(started(*JOIN, *words).functions) == {"m.py:build", "d.py:data", "d.py:loss"}
