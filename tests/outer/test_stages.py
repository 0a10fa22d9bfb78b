"""Stages of a pipeline push and take versions as one, whatever fails on the way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.outer import commands as do
from spantrain.core.outer.events import TransferWay
from spantrain.core.outer.stages import StageMeeting, StageOrder, StageReport
from spantrain.errors import ProtocolError
from testing.outer.stages import Fleet, StagesServer
from testing.patience import no_threads_left

WORKERS = ("a/w1", "a/w2")


def test_with_rate_1_and_no_momentum_it_is_local_training():
    with no_threads_left(), StagesServer() as server, Fleet(server) as fleet:
        fleet.until("has_begun")
        for _ in range(7):
            fleet.step(0.5)
        fleet.until("has_given_all", everything=True)
        assert fleet.values == [3.5] * 3
        assert all(torch.equal(one, torch.full_like(one, 3.5)) for one in fleet.shared)
        metrics = fleet.leader.meter.read()
        assert (metrics.inner_steps, metrics.tokens, metrics.outer_rounds >= 1) == (7, 56, True)


def test_all_that_was_trained_on_counts_once():
    with StagesServer() as server, Fleet(server) as fleet:
        fleet.until("has_begun")
        for _ in range(9):
            fleet.step(1.0, tokens=5)
        fleet.until("has_given_all", everything=True)
        assert server.do(lambda: server.master.state.leading.clusters["a"].tokens) == 45


def test_each_stage_moves_its_own_layers():
    moved: dict[str, set[int]] = {}

    def note(command: object) -> bool:
        if isinstance(command, do.Move):
            moved.setdefault(command.transfer.worker, set()).add(command.transfer.layer)
        return True

    with StagesServer() as server:
        server.hook = note
        with Fleet(server) as fleet:
            fleet.until("has_begun")
            fleet.step(1.0)
            fleet.until("has_given_all", everything=True)
    assert moved == {"a": {0}, "a/w1": {1}, "a/w2": {2}}


def test_two_pipelines_that_are_cut_differently_share_a_model():
    with StagesServer() as server, Fleet(server) as first, Fleet(server, "b", stages=2) as second:
        first.until("has_given_all", everything=True)
        second.until("has_begun")
        for _ in range(4):
            first.step(1.0)
            second.step(3.0)
        first.until("has_given_all", everything=True)
        second.until("has_given_all", everything=True)
        (shared,) = torch.cat(second.shared).unique().tolist()
        assert second.values == [shared] * 2


@pytest.mark.parametrize("way", [TransferWay.PUSH, TransferWay.PULL])
def test_a_layer_that_one_stage_loses_skips_the_round_for_all(way):
    lost = []

    def hook(command: object) -> bool:
        if isinstance(command, do.Move) and command.way is way and command.transfer.worker == "a/w2" and not lost:
            lost.append(command.transfer.ticket)
            server._lose(command.way, command.transfer, "the network broke")
            return False
        return True

    with StagesServer() as server, Fleet(server) as fleet:
        fleet.until("has_begun")
        server.hook = hook
        for _ in range(6):
            fleet.step(1.0)
        fleet.until("has_given_all", everything=True)
        assert lost
        assert fleet.values == [6.0] * 3
        assert all(torch.equal(one, torch.full_like(one, 6.0)) for one in fleet.shared)


def test_it_trains_by_itself_while_a_stage_is_cut_off():
    with StagesServer() as server, Fleet(server) as fleet:
        fleet.until("has_begun")
        server.do(lambda: server.cut("a/w1"))
        for _ in range(10):
            fleet.step(1.0)
        assert fleet.values == [10.0] * 3
        server.do(lambda: server.mend("a/w1"))
        fleet.until("has_given_all", everything=True)
        assert fleet.values == [10.0] * 3


def test_the_leader_joins_when_all_others_are_there():
    with StagesServer() as server:
        server.away.add("a/w2")
        with Fleet(server) as fleet:
            for _ in range(5):
                fleet.step(1.0)
            assert server.do(lambda: "a" not in server.clients)
            server.do(lambda: server.mend("a/w2"))
            fleet.until("has_given_all", everything=True)
            assert fleet.values == [5.0] * 3


def test_an_order_for_what_is_not_here_is_an_error():
    with StagesServer() as server, Fleet(server) as fleet:
        fleet.until("has_begun")
        order = StageOrder(pull=do.Ticket(9, 9), version=4)
        with pytest.raises(ProtocolError, match="version 4, which did not come here"):
            fleet.workers["d1"].follow(StageMeeting(reports={"d0": StageReport(order=order)}))


FAULTS = st.sampled_from(
    ["step", "step", "step", "cut", "mend", "cut leader", "lose", "shard", "master", "settle"]
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(FAULTS, st.integers(0, 1)), max_size=25))
def test_stages_never_mix_rounds_or_versions(script):
    """`Fleet.meet` compares all stages at every boundary; at the end nothing that was learned is lost or doubled."""
    steps, to_lose = 0, []

    def hook(command: object) -> bool:
        if isinstance(command, do.Move) and command.transfer.worker in to_lose:
            to_lose.clear()
            server._lose(command.way, command.transfer, "the network broke")
            return False
        return True

    with StagesServer() as server, Fleet(server) as fleet:
        fleet.until("has_begun")
        server.hook = hook
        for what, which in script:
            name = WORKERS[which]
            match what:
                case "step":
                    fleet.step(1.0)
                    steps += 1
                case "cut":
                    server.do(lambda name=name: server.cut(name))
                case "cut leader":
                    server.do(lambda: server.cut("a"))
                case "mend":
                    for one in ("a", *server.away):
                        server.do(lambda one=one: one in server.away and server.mend(one))
                case "lose":
                    to_lose.append(name)
                case "shard":
                    server.do(lambda which=which: server.master and server.restart_shard(f"s{which}"))
                case "master":
                    server.do(lambda: server.master and server.restart_master())
                case _:
                    fleet.meet()
        for one in tuple(server.away):
            server.do(lambda one=one: server.mend(one))
        fleet.until("has_given_all", everything=True)
        assert fleet.values == [float(steps)] * 3
        assert all(torch.equal(one, torch.full_like(one, float(steps))) for one in fleet.shared)
