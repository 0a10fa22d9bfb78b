"""Serve one device of this machine to a coordinator."""

import contextlib
import logging
import os
import shlex
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path

import psutil

from spantrain.app.relay import relay_access
from spantrain.config.files.text_files import check_can_make, read_text
from spantrain.core.records import Record
from spantrain.devices.registry import default_backend
from spantrain.errors import ConfigError
from spantrain.runtime.coordinator.roster import RANK_PREFIX
from spantrain.runtime.launch.environment import Environment
from spantrain.runtime.launch.fork_server import load
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.runtime.worker.worker import JOIN_S, Worker
from spantrain.transport.control.address import Address, address_towards

_log = logging.getLogger(__name__)
_NOTICE_S = 2.0
"""Between two looks for a notice that this machine is about to be taken away."""


class WorkerReach(Record):
    """How others reach a worker, as its user says it."""

    data_address: str | None = None
    interface: str | None = None
    """Whose address it is."""
    relay: str | None = None
    """HOST:PORT, where it cannot be dialled."""
    encrypted: bool = True

    def address(self, join: str) -> str:
        """Return where it listens: where that was said, else on the way to the coordinator.

        Raises:
            ConfigError: there is no such interface, or an address was said, too.
        """
        if self.interface is None:
            return self.data_address or address_towards(join)
        if self.data_address is not None:
            raise ConfigError(f"--interface {self.interface}: its address is the one to listen on; no --data-address")
        return address_of(self.interface)


def prepared_worker(
    *,
    join: Sequence[str],
    token_file: Path | None,
    name: str | None,
    backend: str | None,
    reach: WorkerReach,
    functions: Sequence[str] = (),
    keep_s: float = 0.0,
    folder: Path | None = None,
) -> Worker:
    """Return what joins, carries out orders, and returns when the coordinator has no more.

    The coordinator is at the first place of `join`; one may be started in its stead at the others.
    Under torchrun the device's name may be left out: it is then the coordinator's device number RANK; and the
    accelerator is number LOCAL_RANK. The token is in a file, or in SPANTRAIN_TOKEN: among the words of a command other
    users of the machine could see it.

    Raises:
        ConfigError: there is no token, no name, or no such way to reach it.
        UsageError: the token or the environment makes no sense.
    """
    if folder is not None:
        check_can_make(folder, "--folder")
    first, *others = join
    for place in others:
        Address.parse(place, "--or-join")
    environment = Environment.read(os.environ)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    own = own_address(told := reach.address(first), first)
    local_rank = (environment.launch.local_rank or 0) if environment.launch else 0
    settings = WorkerSettings(
        join=first,
        or_join=tuple(others),
        name=_name_by_rank(environment) if name is None else name,
        token=_token(token_file, environment),
        backend=default_backend(local_rank) if backend is None else backend,
        data_address=told,
        listen_address="" if own == told else own,
        relay=relay_access(reach.relay, encrypted=reach.encrypted),
        encrypted=reach.encrypted,
        functions=tuple(functions),
        keep_s=keep_s,
        folder="" if folder is None else str(folder.absolute()),
    )
    if environment.gloo_interfaces is None and (found := _interfaces_of(own)):
        os.environ["GLOO_SOCKET_IFNAME"] = next(iter(found.values()))
    _log.info("%s looks for the coordinator at %s, for %.0f s at most", settings.name, " or ".join(join), JOIN_S)
    load()
    return Worker(settings)


def _name_by_rank(environment: Environment) -> str:
    """Return a name in whose place the coordinator puts the device of that number."""
    if environment.launch is None:
        raise ConfigError("give --name DEVICE, the device's name in the cluster file (torchrun's RANK will do, too)")
    return f"{RANK_PREFIX}{environment.launch.rank}"


def own_address(told: str, join: str) -> str:
    """Return where to listen for those who reach this machine at an address or name.

    That is where its way to the coordinator begins if it has not got that address itself (behind address translation),
    or if it is a name that stands for its loopback here, as many a machine's own.
    """
    found = (address for address in _interfaces_of(told) if address == told or not ip_address(address).is_loopback)
    return next(found, None) or address_towards(join)


def _interfaces_of(place: str) -> dict[str, str]:
    """Return the addresses of this machine that an address or a name stands for, with their network interfaces.

    Gloo would take the address that the machine's own name has, which is a loopback one on many.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(place, None)}
    except (OSError, UnicodeError):
        return {}
    return {row.address: name for name, rows in psutil.net_if_addrs().items() for row in rows if row.address in found}


def _token(file: Path | None, environment: Environment) -> str:
    if file is not None:
        return read_text(file, remedy="write the token there that the coordinator printed").strip()
    if environment.join_token is None:
        raise ConfigError("give the coordinator's token: in SPANTRAIN_TOKEN, or with --token-file FILE")
    return environment.join_token


def address_of(interface: str) -> str:
    """Return this machine's address on a network interface.

    Raises:
        ConfigError: it has none.
    """
    every = psutil.net_if_addrs().items()
    found = {name: row.address for name, rows in every for row in rows if row.family == socket.AF_INET}
    if interface not in found:
        there = ", ".join(f"{name} ({address})" for name, address in sorted(found.items()))
        raise ConfigError(f"--interface {interface}: has no IPv4 address here; there are {there}")
    return found[interface]


@contextlib.contextmanager
def noticing(notice: str | None, leave: Callable[[str], bool]) -> Iterator[None]:
    """Ask again and again whether this machine is about to be taken away, and have its device leave then.

    Args:
        notice: a file that then exists, an http(s) URL that then answers with 200 (and something else than FALSE), or a
            command that then ends with 0.
        leave: told why, in another thread, until it says that it does.

    Raises:
        ConfigError: it is none of these.
    """
    if notice is not None and not _words(notice):
        raise ConfigError("--notice: is empty; give a file, a URL or a command")
    ended = threading.Event()

    def ask() -> None:
        while notice is not None and not ended.wait(_NOTICE_S):
            if _given(notice) and leave(f"notice by {notice}"):
                return

    thread = threading.Thread(target=ask, name="notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _words(notice: str) -> list[str]:
    try:
        return shlex.split(notice)
    except ValueError as error:
        raise ConfigError(f"--notice {notice!r}: {error}; give a file, a URL or a command") from None


def _given(notice: str) -> bool:
    if notice.startswith(("http://", "https://")):
        request = urllib.request.Request(notice, headers={"Metadata-Flavor": "Google", "Metadata": "true"})
        try:
            with urllib.request.urlopen(request, timeout=_NOTICE_S) as answer:
                return bool(answer.status == HTTPStatus.OK and answer.read(64).strip().upper() != b"FALSE")
        except (OSError, HTTPException, ValueError):  # nobody answers, or not as HTTP does
            return False
    if Path(notice).exists():
        return True
    words = _words(notice)
    if shutil.which(words[0]) is None:
        return False
    try:
        quiet = subprocess.DEVNULL
        return subprocess.run(words, stdout=quiet, stderr=quiet, timeout=10 * _NOTICE_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
