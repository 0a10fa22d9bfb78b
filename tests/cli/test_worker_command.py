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


def test_address_and_token_may_be_in_variables(started):
    settings = started("worker", "--name", "lab-0", SPANTRAIN_JOIN="127.0.0.1:7000", SPANTRAIN_TOKEN=TOKEN)
    assert (settings.join, settings.token, settings.name) == ("127.0.0.1:7000", TOKEN, "lab-0")


def test_others_reach_it_where_the_way_to_the_coordinator_begins_or_where_that_is_said(started):
    assert started(*JOIN, "--name", "a").data_address == "127.0.0.1"
    assert started(*JOIN, "--name", "a", "--data-address", "10.0.0.7").data_address == "10.0.0.7"


def test_replicas_meet_at_that_address_or_on_the_interface_that_is_said(started):
    for words in ((), ("--data-address", "127.0.0.1"), ("--data-address", "192.0.2.7")):  # the last is nobody's
        started(*JOIN, "--name", "a", *words, GLOO_SOCKET_IFNAME="")
        assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    started(*JOIN, "--name", "a", GLOO_SOCKET_IFNAME="eth7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_under_torchrun_it_has_the_rank_for_a_name_and_the_local_ranks_device(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = started(*JOIN, **TORCHRUN)
    assert (settings.name, settings.backend) == ("rank-3", "cuda:1")
    assert started(*JOIN, "--name", "lab-0").name == "lab-0"


def test_it_may_call_the_functions_that_it_is_started_with(started):
    words = ("--name", "a", "--model", "m.py:build", "--function", "d.py:data", "--function", "d.py:loss")
    assert set(started(*JOIN, *words).functions) == {"m.py:build", "d.py:data", "d.py:loss"}
