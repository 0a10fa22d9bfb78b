"""What ends an order that is not done: the request, the waits, at last the process."""

import socket
import threading
from contextlib import ExitStack

import pytest

from spantrain.errors import Interrupted, PeerLostError
from spantrain.runtime.control.requests import Standing
from spantrain.runtime.worker.watch import Watch, connections, cut, standing_of
from testing.patience import PATIENCE_S

LOST = Standing(lost="the coordinator was lost")
ENDED = Standing(ended_orders=3, reason="device b was lost")
LEAVING = Standing(leave=True)


@pytest.mark.parametrize(
    ("standing", "order", "cause"),
    [
        (Standing(), 3, None),
        (Standing(ended_orders=2), 3, None),
        (Standing(ended_orders=2), None, None),
        (ENDED, 3, Interrupted),
        (ENDED, 4, None),
        (LOST, 3, PeerLostError),
        (LOST, None, PeerLostError),
        (LEAVING, 3, Interrupted),
        (LEAVING, None, None),
    ],
)
def test_why_an_order_is_over(standing, order, cause):
    found = standing.why_over(order)
    assert type(found) is (cause or type(None))
    if cause:
        assert str(found) in (standing.lost, standing.reason, "the coordinator has ended this run")


def test_a_process_has_seconds_to_end_and_more_to_leave_an_order():
    assert Standing().patience_s(3) is None
    assert ENDED.patience_s(4) is None
    assert LOST.patience_s(None) == LEAVING.patience_s(3) == LEAVING.patience_s(None)
    assert ENDED.patience_s(3) > LOST.patience_s(3) > 0


@pytest.mark.parametrize("answer", [{}, {"ended_orders": "all", "reason": 7, "leave": 1}])
def test_an_answer_that_says_nothing_changes_nothing(answer):
    assert standing_of(answer, None) == Standing()


class Stuck:
    """A process whose order does not end, and what is done to it."""

    def __init__(self) -> None:
        self.standing = Standing()
        self.interrupts = 0
        self.causes: list[str] = []
        self.interrupted, self.ended = threading.Event(), threading.Event()

    def watch(self) -> Watch:
        return Watch(lambda: self.standing, interrupt=self._interrupt, give_up=self._give_up)

    def _interrupt(self) -> None:
        self.interrupts += 1
        self.interrupted.set()

    def _give_up(self, cause: str) -> None:
        self.causes.append(cause)
        self.ended.set()


def test_one_that_nothing_stops_is_ended_with_the_cause():
    stuck = Stuck()
    with stuck.watch() as watch:
        watch.begin(3)
        watch.check()
        stuck.standing = LOST
        watch.look_again()
        assert stuck.interrupted.wait(PATIENCE_S)
        with pytest.raises(PeerLostError, match="the coordinator was lost"):
            watch.check()
        assert stuck.ended.wait(PATIENCE_S)
    assert stuck.causes == ["the coordinator was lost"]
    assert stuck.interrupts >= 2, "a wait may have begun behind the first"


def test_one_that_leaves_its_order_lives_on():
    stuck = Stuck()
    with stuck.watch() as watch:
        watch.begin(3)
        stuck.standing = ENDED
        watch.look_again()
        assert stuck.interrupted.wait(PATIENCE_S)
        watch.begin(None)
        watch.check()
        watch.begin(4)
        watch.check()
    assert stuck.causes == []


def test_connections_that_were_opened_since_end_but_for_those_to_spare():
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        addresses = [server.getsockname() for server in servers]

        def opened(address):
            line = stack.enter_context(socket.create_connection(address))
            line.settimeout(PATIENCE_S)
            return line

        old = opened(addresses[0])
        before = connections()
        new, spared = opened(addresses[1]), opened(addresses[2])
        (peer, _), (own, _) = servers[1].accept(), servers[2].accept()
        stack.callback(peer.close)
        stack.callback(own.close)
        cut(before, {f"127.0.0.1:{addresses[2][1]}"})
        assert new.recv(1) == b""
        for line in (old, spared):
            line.sendall(b"x")
        assert own.recv(1) == b"x"
