"""Opens the page of a run's folder: a socket, a token, a process that serves."""

import contextlib
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from spantrain.app.watching.server import in_thread, text_resource
from spantrain.core.records import Record
from spantrain.errors import UsageError
from spantrain.reach.machines import wait_or_kill
from spantrain.transport.control.address import Address

_LOCAL = ("127.0.0.1", "localhost", "::1")
_END_S = 3.0
_BACKLOG = 128


def listen_on(text: str, option: str) -> tuple[socket.socket, Address]:
    """Return a socket that listens at `HOST:PORT`, and its address; port 0 is any that is free.

    Raises:
        UsageError: it is no such address, is in use, or cannot be listened on.
    """
    address = Address.parse(text, option)
    if address.path:
        raise UsageError(f"{option} {text}: a page is served at HOST:PORT")
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listening = socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(f"{option} {text}: {error.strerror or error}; name another, or port 0 for any") from None
    return listening, address.at_port(listening.getsockname()[1])


@contextlib.contextmanager
def metrics_at(
    listen: str | None, token: str | None, make: Callable[[], str], tell: Callable[[str], object]
) -> Iterator[None]:
    """Serve this process's metrics beside what is done inside, if an address is given; `tell` says where they are.

    Raises:
        UsageError: as `listen_on`.
    """
    if listen is None:
        yield
        return
    listening, address = listen_on(listen, "--metrics")
    shown, secret = address.as_dialled(), token or secrets.token_urlsafe(24)
    with in_thread({"/metrics": text_resource(make)}, listening, token=secret, host=shown.host):
        header = "" if token else f", with the header Authorization: Bearer {secret}"
        tell(f"Metrics: http://{shown}/metrics{header}")
        yield


class ServedPage(Record):
    """A page that is being served."""

    url: str
    """With the token, behind the #: a browser sends that to nobody."""
    warning: str
    """What is to be said of it, or nothing."""
    wait: Callable[[], object]
    """Returns when the page is served no more."""


@contextlib.contextmanager
def page_of(folder: Path, listen: str, option: str) -> Iterator[ServedPage]:
    """Serve the page of a run's folder beside what is done inside.

    Raises:
        UsageError: as `listen_on`.
    """
    listening, address = listen_on(listen, option)
    shown = address.as_dialled()
    token = secrets.token_urlsafe(24)
    with listening:
        number = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "spantrain.app.watching.server", str(number), str(folder.absolute()), shown.host],
            stdin=subprocess.PIPE,
            pass_fds=[number],
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()
        warning = "" if address.host in _LOCAL else (
            "; it is not encrypted: where others can listen, keep it on 127.0.0.1 and come by ssh -L"
        )  # fmt: skip
        yield ServedPage(url=f"http://{shown}/#{token}", warning=warning, wait=process.wait)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        wait_or_kill(process, _END_S)
