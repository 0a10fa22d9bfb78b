"""Serves one page, what it shows, and metrics, to browsers and Prometheus; over asyncio, with nothing but GET.

What it answers is a fixed table of paths, so no request names a file. All but the page itself, in which no figure
stands, is for those alone who show the token in a header, which no other site's page can make a browser do. Each
connection is one request of bounded size and time; of too many connections the oldest is dropped, so that a thousand
slow ones keep nobody out, and only so many are taken in a second. It is a process of its own with low priority, or one
thread (`in_thread`): training waits for none of it.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from importlib import resources
from pathlib import Path

from spantrain.app.watching.metrics_text import metrics_of_view
from spantrain.core.records import Record
from spantrain.transport.connection.bounds import ConnectionPace

_REQUEST_BYTES = 8192
_REQUEST_S = 5.0
_ANSWER_S = 30.0
_CONNECTIONS = 128
_BURST, _NEW_PER_S = 1024, 20.0
"""Connections that are taken at once, and then in a second."""
_FILE_BYTES = 2**25
_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]{0,200}) HTTP/1\.[01]")
_HEADER = re.compile(r"([A-Za-z0-9-]{1,64}):[ \t]*([\t -~]*)")
_SINGLE = ("host", "origin", "authorization", "if-none-match", "content-length", "transfer-encoding")
_ALWAYS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HTML, _JSON = "text/html; charset=utf-8", "application/json"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class PageAnswer(Record):
    """What one request gets."""

    status: HTTPStatus
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] | None = None


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Resource(Record):
    """What is at a path."""

    make: Callable[[str], PageAnswer]
    """Given what the browser says that it has already (an entity tag)."""
    open: bool = False
    """Whether it is for everybody."""


class PageServer:
    """Answers at a socket, from `run` on, until it is cancelled."""

    def __init__(
        self, resources_: Mapping[str, Resource], *, token: str, host: str, request_s: float = _REQUEST_S
    ) -> None:
        """`host`: the name by which it may be asked for, besides addresses and localhost; `request_s`: how long a whole
        request may take, however many pieces it comes in.
        """
        self._resources, self._token, self._host = resources_, token.encode(), host.lower()
        self._request_s = request_s
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def run(self, listening: socket.socket) -> None:
        """Serve. Whoever calls faster than that waits with the kernel, and costs this process nothing."""
        loop, pace = asyncio.get_running_loop(), ConnectionPace(burst=_BURST, per_s=_NEW_PER_S)
        listening.setblocking(False)
        with listening:
            while True:
                while wait_s := pace.wait_s(loop.time()):
                    await asyncio.sleep(wait_s)
                reader = asyncio.StreamReader(limit=_REQUEST_BYTES)
                met = partial(asyncio.StreamReaderProtocol, reader, self._connection)
                with contextlib.suppress(OSError):  # it has gone already, or this process has too many files open
                    taken, _ = await loop.sock_accept(listening)
                    await loop.connect_accepted_socket(met, taken)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(self._open) >= _CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(self._request_s):
                answer = await self._answered(reader)
            if answer is not None:
                writer.write(_written(answer))
                async with asyncio.timeout(_ANSWER_S):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # it has gone, or took too long
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _answered(self, reader: asyncio.StreamReader) -> PageAnswer | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"over {_REQUEST_BYTES} bytes")
        except asyncio.IncompleteReadError:
            return None
        try:
            return self._answer(head.decode("latin-1"))
        except _Refused as refused:
            return _plain(refused.status, str(refused))
        except (ValueError, LookupError, TypeError):  # of what a file holds
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the run's view.json is damaged; its next step mends it")

    def _answer(self, head: str) -> PageAnswer:
        lines = head[:-4].split("\r\n")
        asked = _REQUEST_LINE.fullmatch(lines[0])
        if asked is None:
            raise _Refused(HTTPStatus.BAD_REQUEST, "no request that is understood here")
        headers = _headers(lines[1:])
        if asked[1] != "GET":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "there is nothing but GET")
        self._check_where_from(headers)
        found = self._resources.get(asked[2])
        shown = headers.get("authorization", "").encode()
        if (found is None or not found.open) and not hmac.compare_digest(shown, b"Bearer " + self._token):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "show the token: Authorization: Bearer TOKEN")
        if found is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")
        return found.make(headers.get("if-none-match", ""))

    def _check_where_from(self, headers: Mapping[str, str]) -> None:
        """Refuse names that are not ours, to which somebody may have given our address, and pages of others.

        Raises:
            _Refused: it is asked for as somebody else, or by another site's page.
        """
        host = headers.get("host", "").lower()
        name = re.sub(r":\d{1,5}$", "", host)
        if name not in ("localhost", self._host) and not _is_address(name):
            raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, "this is another host")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise _Refused(HTTPStatus.FORBIDDEN, "this is for its own page")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise _Refused(HTTPStatus.FORBIDDEN, "this is for its own page")


def _headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None or (match[1].lower() in found and match[1].lower() in _SINGLE):
            raise _Refused(HTTPStatus.BAD_REQUEST, "a header is wrong, or given twice")
        found[match[1].lower()] = match[2].strip()
    if "transfer-encoding" in found or found.get("content-length", "0") != "0":
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a GET has no body")
    return found


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _plain(status: HTTPStatus, text: str) -> PageAnswer:
    return PageAnswer(status=status, body=f"{status.phrase}: {text}\n".encode())


def _written(answer: PageAnswer) -> bytes:
    headers = {
        **_ALWAYS, "Content-Type": answer.kind, "Content-Length": str(len(answer.body)), **(answer.headers or {}),
    }  # fmt: skip
    if answer.status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n{head}\r\n".encode() + answer.body


def page_resource() -> Resource:
    """Return the page: one document, whose policy lets it run its own script, ask this server, and nothing else."""
    html = resources.files("spantrain.app.watching").joinpath("page.html").read_bytes()
    sources = {
        name: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'"
            for part in re.findall(rb"<%s>(.*?)</%s>" % (name.encode(), name.encode()), html, re.DOTALL)
        )
        for name in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Frame-Options": "DENY"}
    answer = PageAnswer(status=HTTPStatus.OK, body=html, kind=_HTML, headers=headers)
    return Resource(make=lambda _tag: answer, open=True)


def file_resource(path: Path) -> Resource:
    """Return a JSON file as it is now; who has it already is told so."""

    def make(tag: str) -> PageAnswer:
        content, mark, age_s = _read(path)
        if content is None:
            return _plain(HTTPStatus.NOT_FOUND, "the run has written nothing yet")
        headers = {"ETag": mark, "X-Age-Seconds": f"{age_s:.1f}"}
        if tag == mark:
            return PageAnswer(status=HTTPStatus.NOT_MODIFIED, kind=_JSON, headers=headers)
        return PageAnswer(status=HTTPStatus.OK, body=content, kind=_JSON, headers=headers)

    return Resource(make=make)


def text_resource(make: Callable[[], str]) -> Resource:
    """Return metrics as Prometheus reads them."""
    return Resource(make=lambda _tag: PageAnswer(status=HTTPStatus.OK, body=make().encode(), kind=_TEXT))


def _read(path: Path) -> tuple[bytes | None, str, float]:
    """Return a file's content, its entity tag and its age in seconds; None as its content if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        about = os.fstat(file.fileno())
        age_s = max(0.0, time.time() - about.st_mtime)
        if about.st_size <= _FILE_BYTES:
            return file.read(_FILE_BYTES), f'"{about.st_mtime_ns:x}-{about.st_size:x}"', age_s
    return None, "", 0.0


def folder_resources(folder: Path) -> dict[str, Resource]:
    """Return what is served of a run's folder."""
    view = folder / "view.json"
    return {
        "/": page_resource(),
        "/view.json": file_resource(view),
        "/metrics": text_resource(lambda: metrics_of_view(_read(view)[0])),
    }


@contextlib.contextmanager
def in_thread(
    found: Mapping[str, Resource], listening: socket.socket, *, token: str, host: str, request_s: float = _REQUEST_S
) -> Iterator[None]:
    """Serve beside what is done inside."""
    server = PageServer(found, token=token, host=host, request_s=request_s)
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        task = loop.create_task(server.run(listening))
        await ended.wait()
        task.cancel()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed where the thread has ended
            loop.call_soon_threadsafe(ended.set)
        thread.join(_REQUEST_S)


def main() -> None:
    """Serve a folder as a process of its own: FD of the socket, FOLDER, HOST; the token is standard input's first line.

    It ends when standard input does: with whoever has started it, however that ends.
    """
    number, folder, host = sys.argv[1:]
    os.nice(10)
    token = sys.stdin.readline().strip()
    with in_thread(folder_resources(Path(folder)), socket.socket(fileno=int(number)), token=token, host=host):
        sys.stdin.read()


if __name__ == "__main__":
    main()
