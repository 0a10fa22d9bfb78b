"""The outer optimizer's master, or one of its shards, in this process, until it is told to end."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from spantrain.app.outer.join import address_file, naming
from spantrain.app.relay import reached_through
from spantrain.app.watching.metrics_text import master_metrics, shard_metrics
from spantrain.config.files.text_files import write_atomically
from spantrain.errors import ConfigError, WorkerError
from spantrain.outer.master.files import token_file
from spantrain.outer.master.server import MasterServer
from spantrain.outer.outer_file import MemberPlace, OuterConfig
from spantrain.outer.shard.server import ShardServer, master_link
from spantrain.outer.shard.snapshots import FolderSnapshots
from spantrain.transport.control.address import Address
from spantrain.transport.relay.protocol import RelayAccess

_LOOK_EVERY_S = 0.5


_Metrics = Callable[[Callable[[], str]], AbstractContextManager[None]]
"""Serves what a function returns as metrics, beside what is done inside."""


def serve_master(
    config: OuterConfig, *, ready: Callable[[str, Path], None], end_with_input: bool, metrics: _Metrics,
    relay: RelayAccess | None = None,
) -> None:  # fmt: skip
    """Serve until interrupted; `ready` hears the address and where the token is.

    Raises:
        UsageError: the address, the state folder or the relay cannot be used.
        PeerLostError: no relay answers.
        WorkerError: the state could not be written.
    """
    place, stop = config.master, _begin(end_with_input=end_with_input)
    with naming(config, "master.state"):
        server = MasterServer(bind=str(place.listen), state_dir=place.folder, config=config.for_master)
    with ExitStack() as stack:
        with naming(config, "master.listen"):
            stack.enter_context(server)
        stack.enter_context(_through(relay, place, 2))
        stack.enter_context(metrics(lambda: master_metrics(server.status())))
        address = str(place.address.at_port(Address.parse(server.address).port))
        write_atomically(address_file(config), f"{address}\n")
        ready(address, token_file(place.folder))
        while not stop.wait(_LOOK_EVERY_S):
            if server.failure:
                raise WorkerError(server.failure)


def serve_shard(
    config: OuterConfig, place: MemberPlace, *, master: str, token: str, ready: Callable[[str], None],
    end_with_input: bool, metrics: _Metrics, relay: RelayAccess | None = None,
) -> None:  # fmt: skip
    """Serve until interrupted, whether the master is there or not; `ready` hears where layers come in.

    Raises:
        ConfigError: the address, the folder or the relay cannot be used.
        PeerLostError: no relay answers.
        WorkerError: it cannot go on.
        SpanTrainError: the master does not let it in; a `UsageError` where that is for good.
    """
    stop, listen = _begin(end_with_input=end_with_input), place.listen
    with naming(config, f"shards.{place.name}.listen"):
        listen.check_free()
    # Its sockets know no names.
    found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    try:
        server = ShardServer(
            name=place.name,
            bind=f"tcp://{replace(listen, host=str(found[4][0]))}",
            snapshots=FolderSnapshots(place.folder),
            link_of=master_link(address=master, token=token, name=place.name),
            host=place.address.host,
            encrypted=config.for_master.encrypted,
        )
    except OSError as error:
        raise ConfigError(
            f"shard {place.name}: cannot use {listen} and {place.folder}: {error}; free them or take others"
        ) from None
    with server, _through(relay, place, 1), metrics(lambda: shard_metrics(place.name, server)):
        ready(server.endpoint)
        while not stop.wait(_LOOK_EVERY_S):
            if server.failure:
                raise WorkerError(f"shard {place.name}: {server.failure}")
            if refused := server.link.refused:
                raise type(refused)(f"shard {place.name}: {refused}")


def _through(relay: RelayAccess | None, place: MemberPlace, ports: int) -> AbstractContextManager[object]:
    """Have a place be reached by a relay, if there is one, whose host is that of the place's address."""
    return nullcontext() if relay is None else reached_through(relay, place.listen, ports)


def _begin(*, end_with_input: bool) -> threading.Event:
    """Log to stderr; return an event that is set when standard input ends, if that is wanted.

    It ends when whoever started this process has ended.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    stop = threading.Event()

    def wait() -> None:
        # Not through sys.stdin: whoever reads that in a thread aborts an interpreter that ends.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop.set()

    if end_with_input:
        threading.Thread(target=wait, name="input", daemon=True).start()
    return stop
