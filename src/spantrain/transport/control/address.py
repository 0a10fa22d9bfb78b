"""Addresses of the control plane: `HOST:PORT` or `unix:/path`, to listen on or to dial."""

import errno
import re
import socket
import stat
from dataclasses import replace
from pathlib import Path

from spantrain.core.records import Record
from spantrain.errors import ConfigError, UsageError

_TCP = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w-]{1,63}(?:\.[\w-]{1,63})*\.?)):(\d{1,5})", re.ASCII)
_UNIX_PATH_LIMIT_BYTES = 107
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""By what stands for all addresses of a machine."""
_CONTROL_SUFFIX = ".control"


class Address(Record):
    """A place to listen on or to dial; a socket's path, or a host and a port."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, option: str = "") -> "Address":
        """Read the text form, which an option may have given.

        >>> Address.parse("[::1]:29400").port, str(Address.parse("unix:/run/spantrain.sock"))
        (29400, 'unix:/run/spantrain.sock')

        Raises:
            UsageError: it is neither `HOST:PORT` nor `unix:/path`.
        """
        told = f"{option}: {text!r}".removeprefix(": ")
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if not path.startswith("/") or len((path + _CONTROL_SUFFIX).encode()) > _UNIX_PATH_LIMIT_BYTES:
                raise UsageError(
                    f"{told} is not an address: a socket needs an absolute path of at most "
                    f"{_UNIX_PATH_LIMIT_BYTES - len(_CONTROL_SUFFIX)} bytes, e.g. unix:/tmp/run-1/join"
                )
            return cls(path=path)
        match = _TCP.fullmatch(text)
        if match is None or int(match[3]) > 65535:
            raise UsageError(
                f"{told} is not an address: write HOST:PORT, e.g. 192.0.2.7:29400 or [2001:db8::7]:29400, or unix:/path"
            )
        return cls(host=match[1] or match[2], port=int(match[3]))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The form in which gRPC dials it; a host's name cannot be taken for the name of a scheme."""
        return str(self) if self.path else f"dns:///{self}"

    def at_port(self, port: int) -> "Address":
        """Return the same host with another port."""
        assert not self.path
        return replace(self, port=port)

    @property
    def is_anywhere(self) -> bool:
        """Whether it stands for all addresses of a machine: one to listen on, that nobody can dial."""
        return self.host in _LOOPBACKS

    def as_dialled(self) -> "Address":
        """Return what to tell others: where all addresses are listened on, the name of this machine."""
        return replace(self, host=socket.gethostname()) if self.is_anywhere else self

    def from_here(self) -> "Address":
        """Return what this machine dials: where all addresses are listened on, its loopback."""
        return replace(self, host=_LOOPBACKS.get(self.host, self.host))

    def control_neighbour(self) -> "Address":
        """Return where the control port goes, for a join port here: the next port, or the next file.

        Raises:
            UsageError: there is no next port.
        """
        if self.path:
            return Address(path=self.path + _CONTROL_SUFFIX)
        if self.port == 65535:
            raise UsageError(f"{self}: the coordinator needs this port and the next one; take a port below 65535")
        return self.at_port(self.port + 1 if self.port else 0)

    def dial(self, timeout_s: float) -> socket.socket:
        """Return a connected socket.

        Raises:
            OSError: nobody listens there, or the host is unknown.
        """
        if not self.path:
            return socket.create_connection((self.host, self.port), timeout=timeout_s)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(self.path)
        except OSError:
            connection.close()
            raise
        return connection

    def check_free(self) -> None:
        """Make sure that it can be listened on; a socket file that nobody serves is removed.

        gRPC says neither why it could not bind nor minds taking over a socket file in use.

        Raises:
            UsageError: it is in use, or cannot be listened on; the reason is told.
        """
        if self.path:
            self._check_path_free()
            return
        try:
            family, kind, proto, _, where = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen(1)
        except OSError as error:
            raise UsageError(self._bind_message(error)) from None

    def _bind_message(self, error: OSError) -> str:
        told = {
            errno.EADDRINUSE: "the port is in use; stop what uses it or take another",
            errno.EADDRNOTAVAIL: "it is no address of this machine; take one that is, e.g. 0.0.0.0",
        }
        return f"cannot listen on {self}: {told.get(error.errno or 0) or error.strerror or error}"

    def _check_path_free(self) -> None:
        path = Path(self.path)
        if not path.parent.is_dir():
            raise UsageError(f"cannot listen on {self}: there is no folder {path.parent}")
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise UsageError(f"cannot listen on {self}: a file that is not a socket is there")
        try:
            self.dial(timeout_s=1.0).close()
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise UsageError(self._bind_message(error)) from None
        raise UsageError(f"cannot listen on {self}: another one does; take another path")


def address_towards(join: str) -> str:
    """Return this machine's address on the way to the coordinator; nothing is sent."""
    host, _, port = join.rpartition(":")
    if join.startswith("unix:") or not port.isdecimal():
        return "127.0.0.1"
    try:
        family, kind, _, _, where = min(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM))
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--join {join}: {error}; give HOST:PORT as the coordinator printed it") from error
