"""What a testbed's router is asked over its socket, without a router."""

import threading

from spantrain.testbed import control


def test_an_answer_that_takes_several_pieces_comes_whole_and_holds_up_nobody(tmp_path):
    path = tmp_path / "router.sock"
    server = control.RequestServer(path)
    large = {"links": ["from here to there"] * 400_000}
    got = []
    asks = threading.Thread(target=lambda: got.append(control.ask(path, "status")))
    asks.start()
    asked = None
    while asked is None:
        asked = next((one for fd in server.fds if (one := _received(server, fd)) is not None), None)
    server.answer(asked[0], large)
    assert len(server.fds) == 1
    asks.join(30)
    assert got == [large]


def _received(server, fd):
    try:
        return server.receive(fd)
    except BlockingIOError:
        return None
