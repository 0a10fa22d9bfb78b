"""What a testbed's router is asked over its socket, without a router."""

import select
import threading

from spantrain.testbed import control
from testing.patience import PATIENCE_S


def test_an_answer_that_takes_several_pieces_comes_whole_and_holds_up_nobody(tmp_path):
    path = tmp_path / "router.sock"
    server = control.RequestServer(path)
    large = {"links": ["from here to there"] * 400_000}
    got = []
    asks = threading.Thread(target=lambda: got.append(control.ask(path, "status")), daemon=True)
    asks.start()
    asked = None
    while asked is None:
        ready, _, _ = select.select(server.fds, [], [], PATIENCE_S)
        assert ready
        for fd in ready:
            asked = server.receive(fd) or asked
    server.answer(asked[0], large)
    assert len(server.fds) == 1
    asks.join(PATIENCE_S)
    assert got == [large]
