"""Who wants to leave a run: by a signal, a notice of its cloud, or a person's command."""

import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from spantrain.app import worker
from spantrain.app.live_requests import DRAIN, LOCK_FILE, ask_to_drain, requests_heard
from spantrain.app.training.run_folder import alone_in
from spantrain.app.training.stop import StopRequest
from spantrain.cli.failure import graceful_interrupt, told_interrupt
from spantrain.errors import ConfigError
from testing.patience import PATIENCE_S


class Metadata(BaseHTTPRequestHandler):
    """A cloud's server: 404 until there is something to tell, or FALSE."""

    said: tuple[int, bytes] = (404, b"")

    def do_GET(self) -> None:
        status, body = self.said
        if not status:  # not as HTTP has it
            self.wfile.write(body)
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(worker, "_NOTICE_S", 0.02)


@pytest.fixture
def noticed(soon):
    """What is told of a notice, once it is given."""
    told = []

    def run(notice, give):
        event = threading.Event()

        def leave(why):
            told.append(why)
            event.set()
            return True

        with worker.noticing(notice, leave):
            assert not event.wait(0.1)
            give()
            assert event.wait(PATIENCE_S)
        return told

    return run


def test_a_file_is_a_notice_when_it_is_there(noticed, tmp_path):
    path = tmp_path / "preempted"
    assert noticed(str(path), path.touch) == [f"notice by {path}"]


def test_a_command_is_one_when_it_ends_with_0(noticed, tmp_path):
    path = tmp_path / "told"
    command = f"{sys.executable} -c 'import os; raise SystemExit(not os.path.exists(\"{path}\"))'"
    assert len(noticed(command, path.touch)) == 1


def test_a_url_is_one_when_it_answers_and_not_with_false(noticed):
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/preempted"
        assert not worker._given(url)
        assert not worker._given("http://127.0.0.1:port/preempted")
        Metadata.said = (0, b"what?\r\n\r\n")
        assert not worker._given(url)
        Metadata.said = (200, b"FALSE\n")
        assert noticed(url, lambda: setattr(Metadata, "said", (200, b"TRUE"))) == [f"notice by {url}"]
    finally:
        Metadata.said = (404, b"")
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("notice", ["", "  ", "curl 'http:"])
def test_what_is_no_notice_is_refused(notice):
    with pytest.raises(ConfigError, match=r"--notice.*give a file, a URL or a command"), worker.noticing(notice, bool):
        pass


def test_who_cannot_leave_yet_is_asked_again(soon, tmp_path):
    (tmp_path / "now").touch()
    answers, done = iter([False, False, True]), threading.Event()

    def leave(_why):
        answer = next(answers)
        if answer:
            done.set()
        return answer

    with worker.noticing(str(tmp_path / "now"), leave):
        assert done.wait(PATIENCE_S)


def test_sigterm_asks_to_leave_and_a_second_one_to_stop():
    heard = []
    with told_interrupt(lambda: not heard.append("stop"), lambda: not heard.append("leave")):
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["leave"]
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == ["leave", "stop"]


def test_sigint_asks_to_stop():
    heard = []
    with told_interrupt(lambda: not heard.append("stop"), lambda: not heard.append("leave")):
        os.kill(os.getpid(), signal.SIGINT)
    assert heard == ["stop"]


def test_a_device_is_asked_for_by_a_file_in_the_folder_of_a_run_under_way(tmp_path):
    refused = pytest.raises(ConfigError, match="no run that devices may leave is under way there")
    for names in (("lab-0", "lab-1"), ()):
        (tmp_path / DRAIN).mkdir()
        (tmp_path / DRAIN / "lab-0").touch()  # of a run that was killed
        with requests_heard(tmp_path, names):
            if not names:
                with refused:
                    ask_to_drain(tmp_path, "lab-1")
                continue
            for name in ("", "../lab-1", "lab-2", ".devices"):
                with pytest.raises(ConfigError, match="is no device of this run; give one of lab-0, lab-1"):
                    ask_to_drain(tmp_path, name)
            ask_to_drain(tmp_path, "lab-1")
            assert sorted(file.name for file in (tmp_path / DRAIN).iterdir()) == [".devices", "lab-1"]
            (tmp_path / LOCK_FILE).touch()
            with alone_in(tmp_path):
                ask_to_drain(tmp_path, "lab-1")
            with refused:  # its process was killed: the lock is free, and the folder still there
                ask_to_drain(tmp_path, "lab-1")
        with refused:
            ask_to_drain(tmp_path, "lab-1")


@pytest.fixture
def hangup():
    """Sets what becomes of a closed terminal's signal; whoever runs the tests may ignore it, as nohup does."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("handler", "wanted"), [(signal.SIG_DFL, ["leave"]), (signal.SIG_IGN, [])])
def test_a_closed_terminal_is_told_once_like_sigterm_and_not_where_it_is_ignored(handler, wanted, hangup):
    heard = []
    hangup(handler)
    with told_interrupt(lambda: not heard.append("stop"), lambda: not heard.append("leave")):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert heard == wanted


@pytest.mark.parametrize("first", [(signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)])
def test_the_end_of_a_session_asks_once_and_who_asks_again_is_heard(first, hangup):
    stop = StopRequest()
    stop.begun = True
    hangup(signal.SIG_DFL)
    with graceful_interrupt(stop.ask, lambda: ""):
        for number in first:
            signal.raise_signal(number)
        assert stop.wanted
        assert not stop.at_once
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert stop.at_once


def test_ctrl_c_behind_a_closed_terminal_is_a_second_request(hangup):
    asked = []
    hangup(signal.SIG_DFL)
    with graceful_interrupt(lambda: bool(asked.append(1)), lambda: ""):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
    assert len(asked) == 2
