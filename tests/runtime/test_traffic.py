"""What went to each peer of a device: in a step, and in all."""

from types import SimpleNamespace

from spantrain.runtime.recorder import PeerTraffic
from spantrain.transport.mailbox.interface import PeerCounters


def test_each_step_is_told_what_went_in_it_alone() -> None:
    sent = {"a": 5}
    mailbox = SimpleNamespace(
        counters=lambda: SimpleNamespace(
            peers={peer: PeerCounters(wire_bytes_sent=size) for peer, size in sent.items()}
        )
    )
    traffic = PeerTraffic(mailbox)
    sent |= {"a": 15, "b": 7}
    assert traffic.newly_sent() == {"a": 10, "b": 7}
    sent["b"] = 9
    assert traffic.newly_sent() == {"b": 2}
    assert traffic.newly_sent() == {}
    assert traffic.sent() == {"a": 10, "b": 9}
