"""The page's server under attack: who has no token, who comes from elsewhere, who sends too much or too slowly."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from spantrain.app.watching import server
from spantrain.app.watching.metrics_text import metrics_of_view
from spantrain.app.watching.serve import listen_on, page_of
from spantrain.app.watching.server import folder_resources, in_thread
from spantrain.errors import UsageError
from testing.patience import PATIENCE_S

TOKEN = "a-token"
VIEW = {
    "run": "a", "model": "gpt2-tiny", "schedule": "compact", "generation": 0, "global_batch": 8, "state": "running",
    "updated_unix_s": 1.0, "steps": 9, "steps_done": 3, "step_s": 0.5, "step_s_forecast": None, "tokens_per_s": 12.0,
    "losses": [[1, 3.0], [3, 2.5]], "evaluations": [], "devices": [
        {"name": "lab-0", "site": "lab", "memory_bytes": 100, "busy_ratio": 0.5, "busy_ratio_forecast": 0.6,
         "peak_bytes": None, "peak_bytes_forecast": 70, "held_samples": 4,
         "meters": {"load_ratio": 0.9, "used_bytes": 5, "power_w": 310.0, "energy_j": 2e3, "clock_ratio": None}}],
    "links": [
        {"source": "lab", "target": 'ho"me', "bytes_per_s": None, "planned_bytes_per_s": 5.0, "used_bytes_per_s": 1.0}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "view.json").write_text(json.dumps(VIEW))
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path


@pytest.fixture
def port(folder) -> Iterator[int]:
    listening, address = listen_on("127.0.0.1:0", "--listen")
    with in_thread(folder_resources(folder), listening, token=TOKEN, host="127.0.0.1", request_s=1.0):
        yield address.port


def ask(port: int, path: str, *, method: str = "GET", token: str | None = TOKEN, **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request(
            method, path, headers={**shown, **{name.replace("_", "-"): text for name, text in headers.items()}}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def raw(port: int, sent: bytes) -> bytes:
    """All that comes back for these bytes; nothing where the connection is cut."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        try:
            client.sendall(sent)
            found = b""
            while piece := client.recv(65536):
                found += piece
            return found
        except ConnectionError:
            return b""


def test_the_page_is_one_document_that_may_ask_nobody_else(port):
    status, headers, body = ask(port, "/", token=None)
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    for outside in (b"http:", b"https:", b"@import", b"src="):
        assert outside not in body.replace(b"http://www.w3.org/2000/svg", b""), outside
    assert b"secret" not in body


def test_what_is_seen_of_a_run_is_for_the_token_alone(port):
    for path in ("/view.json", "/metrics", "/secret.txt", "/nothing"):
        for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x"):
            status, headers, body = ask(port, path, token=token)
            assert (status, headers["WWW-Authenticate"]) in ((401, "Bearer"),), (path, token)
            assert b"lab-0" not in body
    assert ask(port, f"/view.json?token={TOKEN}", token=None)[0] == 401
    status, headers, body = ask(port, "/view.json")
    assert (status, json.loads(body)) == (200, VIEW)
    assert headers["Cache-Control"] == "no-store"
    assert ask(port, "/view.json", If_None_Match=headers["ETag"])[0] == 304


def test_pages_of_others_and_names_of_others_are_refused(port):
    assert ask(port, "/view.json", Origin="http://evil.example")[0] == 403
    assert ask(port, "/view.json", Origin="null")[0] == 403
    assert ask(port, "/view.json", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(port, "/view.json", Host="evil.example")[0] == 421, "a name server may give our address to any name"
    assert ask(port, "/", token=None, Host=f"127.0.0.1.evil.example:{port}")[0] == 421
    assert ask(port, "/view.json", Origin=f"http://127.0.0.1:{port}", Host=f"127.0.0.1:{port}")[0] == 200
    assert ask(port, "/view.json", Host="localhost:9999")[0] == 200, "through ssh -L"


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/%2e%2e/secret.txt", "/secret.txt", "//view.json", "/view.json/../secret.txt", "/.",
     "/view.json%00", "/etc/passwd", "/page.html"],
)  # fmt: skip
def test_no_path_leads_to_a_file(port, path):
    status, _, body = ask(port, path)
    assert status == 404
    assert b"secret" not in body.removeprefix(b"secret.txt")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"POST /view.json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", b"413"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"413"),
        (b"PUT /view.json HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"400"),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\r\n folded\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET / HTTP/9\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
    ],
)
def test_requests_that_are_huge_or_none_are_refused(port, sent, status):
    found = raw(port, sent)
    # Who is refused while it still sends may find the connection cut before it has read why.
    assert found.startswith(b"HTTP/1.1 " + status) or (not found and len(sent) > 8192)
    assert ask(port, "/view.json")[0] == 200


def test_a_thousand_slow_clients_keep_nobody_out_and_leave_nothing(port):
    with ExitStack() as stack:
        for number in range(1000):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            client.sendall(b"GET /view.json HTTP/1.1\r\nHost: localhost\r\n")
            if number % 100 == 0:
                assert ask(port, "/view.json")[0] == 200
        assert ask(port, "/view.json")[0] == 200
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b"", "soon the last of them is cut off, too"


def test_of_those_who_call_too_fast_some_are_taken_in_a_second(folder, monkeypatch):
    monkeypatch.setattr(server, "_BURST", 2)
    monkeypatch.setattr(server, "_NEW_PER_S", 10.0)
    listening, address = listen_on("127.0.0.1:0", "--listen")
    with in_thread(folder_resources(folder), listening, token=TOKEN, host="127.0.0.1"):
        begun_s = time.monotonic()
        assert [ask(address.port, "/view.json")[0] for _ in range(7)] == [200] * 7
    assert time.monotonic() - begun_s > 0.4, "five of them waited a tenth of a second each"


def test_a_file_that_is_missing_or_huge_is_no_answer(folder, port):
    (folder / "view.json").unlink()
    assert ask(port, "/view.json")[0] == 404
    assert ask(port, "/metrics")[:1] == (200,)
    with (folder / "view.json").open("wb") as file:
        file.truncate(2**26)
    assert ask(port, "/view.json")[0] == 404


@pytest.mark.parametrize("content", ["{", "[]", json.dumps(VIEW | {"devices": [{"name": "lab-0"}]})])
def test_metrics_of_a_damaged_file_are_an_answer_that_says_so(port, folder, content):
    (folder / "view.json").write_text(content)
    status, _, body = ask(port, "/metrics")
    assert (status, b"view.json is damaged" in body) == (500, True)


def test_metrics_have_stable_names_and_labels_that_cannot_break_out(port):
    _, headers, body = ask(port, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = body.decode()
    assert text == metrics_of_view(json.dumps(VIEW).encode())
    assert 'spantrain_steps_total{run="a"} 3\n' in text
    assert 'spantrain_loss{run="a"} 2.5\n' in text
    assert 'spantrain_device_busy_ratio{run="a",device="lab-0",site="lab"} 0.5\n' in text
    assert 'spantrain_device_power_watts{run="a",device="lab-0",site="lab"} 310.0\n' in text
    assert 'spantrain_device_energy_joules_total{run="a",device="lab-0",site="lab"} 2000.0\n' in text
    assert r'spantrain_link_planned_bytes_per_second{run="a",source="lab",target="ho\"me"} 5.0' in text
    assert "None" not in text
    assert "spantrain_step_forecast_seconds" not in text, "what is not known is left out"


def test_an_address_that_cannot_be_had_is_refused_by_name(port):
    for text in ("nonsense", "unix:/tmp/x", f"127.0.0.1:{port}", "127.0.0.1:99999", "192.0.2.1:0"):
        with pytest.raises(UsageError, match="--page-listen"):
            listen_on(text, "--page-listen")


def test_the_page_of_a_folder_is_served_until_it_is_left(folder):
    with page_of(folder, "127.0.0.1:0", "--listen") as shown:
        url, _, token = shown.url.partition("#")
        port = int(url.rpartition(":")[2].strip("/"))
        assert len(token) >= 32
        assert ask(port, "/view.json", token=token)[0] == 200
        assert ask(port, "/view.json", token=None)[0] == 401
        own = psutil.Process()
        servers = [one for one in own.children() if "spantrain.app.watching.server" in one.cmdline()]
        assert [one.nice() for one in servers] == [min(19, own.nice() + 10)], "training goes first"
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def test_the_server_ends_with_who_has_started_it_however_that_ends(folder):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom spantrain.app.watching.serve import page_of\n"
        "with page_of(Path(sys.argv[1]), '127.0.0.1:0', '--listen') as shown:\n"
        "    print(shown.url, flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline().partition("#")[0].rpartition(":")[2].strip().strip("/"))
    socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    process.stdout.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
        except ConnectionError:
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")


NO_MORE_FILES = """
import resource, socket
from spantrain.app.watching.server import in_thread

listening = socket.create_server(("127.0.0.1", 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (1, 64))
try:
    with in_thread({}, listening, token="t", host="h"):
        pass
except OSError as error:
    print(error.strerror)
"""


def test_where_no_more_files_can_be_open_it_is_told_and_nothing_waits():
    line = [sys.executable, "-c", NO_MORE_FILES]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.stdout == "Too many open files\n"
