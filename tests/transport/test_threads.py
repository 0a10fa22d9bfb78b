"""A thread that others rely on and that a fault ends: who would wait for it hears why."""

import pytest
import torch

from spantrain.errors import ProtocolError
from spantrain.transport.connection.threads import ReliedOnThread
from spantrain.transport.control.heartbeat import HeartbeatThread
from spantrain.transport.mailbox.exchange import Exchange
from spantrain.transport.mailbox.interface import Limits
from spantrain.transport.mailbox.loop import MailboxLoop
from testing.outer.layer_wires import Heard, Wires, a_key, a_layer, specs
from testing.patience import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def fault() -> None:
    raise LookupError("a fault")


def test_a_thread_that_ends_before_its_time_says_why() -> None:
    told: list[str] = []
    thread = ReliedOnThread(fault, name="copier 1", died=told.append)
    thread.start()
    thread.join(PATIENCE_S)
    assert told == ["the thread 'copier 1' has ended: LookupError: a fault"]


def test_a_mailbox_whose_thread_has_ended_says_why_to_its_owner_and_to_who_calls() -> None:
    class Faulty(Exchange):
        @property
        def changed(self) -> bool:
            raise LookupError("a fault")

        @changed.setter
        def changed(self, value: bool) -> None:
            pass

    told: list[str] = []
    exchange = Faulty(name="a", limits=Limits(), encrypted=True, dialable=True)
    loop = MailboxLoop(exchange, "tcp://127.0.0.1:0", None, told.append)
    loop.start()
    loop.wake()
    with pytest.raises(ProtocolError, match=r"the mailbox of a is closed: the thread 'mailbox a' has ended: Lookup"):
        exchange.collect(PATIENCE_S)
    loop.join(PATIENCE_S)
    assert told == ["the thread 'mailbox a' has ended: LookupError: a fault"]


class Clumsy(Heard):
    """Fails at what it is told."""

    def arrived(self, peer, key, tensors) -> None:
        fault()

    def sent(self, peer, key) -> None:
        fault()


@pytest.mark.parametrize(("clumsy", "thread"), [("a", "layers of a"), ("s", "copier 0 of s")])
def test_a_layer_wire_one_of_whose_threads_has_ended_is_closed_and_says_why(clumsy: str, thread: str) -> None:
    with Wires() as wires:
        wires.listeners[clumsy] = Clumsy
        shard, worker = wires.met("a")
        one = {"w": torch.ones(3)}
        shard.expect("a", a_key(), specs(one))
        worker.send("s", a_key(), one)
        faults = wires.heard[clumsy].until(lambda told: told.faults)
        assert faults == [f"the thread '{thread}' has ended: LookupError: a fault"]
        with pytest.raises(ProtocolError, match=f"the layer wire is closed; the thread '{thread}' has ended"):
            wires.wires[clumsy].send("s", a_key(1), a_layer())


def test_a_worker_whose_heartbeats_have_ended_takes_the_coordinator_for_lost() -> None:
    class Client:
        def __getattr__(self, name: str) -> None:
            fault()

    thread = HeartbeatThread(Client())
    thread.start()
    assert thread.await_loss(PATIENCE_S)
    thread.stop()
    assert thread.coordinator_lost == "the thread 'heartbeat' has ended: LookupError: a fault"
