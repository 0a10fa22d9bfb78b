"""One process of the outer optimizer's demonstration: a line of JSON says what to be, such lines say how it goes.

It ends in good order when it is told to, and at once when its input ends, however its parent ended.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spantrain.errors import WorkerError

if TYPE_CHECKING:
    from spantrain.outer.link.status import MasterStatus

_LOOK_EVERY_S = 0.5
_REMOVALS = 10
_NOBODY = 3
"""The exit code of a process that nobody listens to."""


def main() -> None:
    """Be what the first line of standard input says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    orders = FileIO(sys.stdin.fileno(), closefd=False)
    order = json.loads(orders.readline())
    stop = threading.Event()
    if (held := order.pop("hold", None)) is not None:
        fcntl.flock(os.open(held, os.O_RDONLY), fcntl.LOCK_SH)  # until this process ends, however it does
    removed = order.pop("remove", None)
    threading.Thread(target=_listen, args=(orders, stop, removed), name="orders", daemon=True).start()
    {"master": _master, "shard": _shard, "cluster": _cluster}[order.pop("role")](order, stop)


def _listen(orders: FileIO, stop: threading.Event, folder: str | None) -> None:
    """Stop in good order at the next line; end at once at the end of all lines, with a folder that nobody removes.

    Not through sys.stdin: whoever reads that in a thread aborts an interpreter that ends.
    """
    while orders.readline():
        stop.set()
    if folder is not None:
        remove_unheld(folder)
    os._exit(_NOBODY)


def remove_unheld(folder: str) -> None:
    """Remove a folder when none of the processes that hold it is left to write into it; again if this one did."""
    with contextlib.suppress(FileNotFoundError):
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


def _say(**message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _master(order: Mapping[str, Any], stop: threading.Event) -> None:
    from spantrain.outer.master.config import MasterConfig
    from spantrain.outer.master.server import MasterServer
    from spantrain.outer.policy.settings import OuterSettings
    from spantrain.outer.rules.nesterov import Nesterov

    config = MasterConfig(
        shards=tuple(order["shards"]),
        settings=OuterSettings(grace_s=order["grace_s"], clip_norm=None),
        rule=Nesterov(momentum=order["momentum"]),
        samples=order["samples"],
        chunks=order["chunks"],
        encrypted=order["encrypted"],
    )
    with MasterServer(bind=order["bind"], state_dir=Path(order["state"]), config=config) as server:
        _say(address=server.address, token=server.token)
        while not stop.wait(order["say_every_s"]):
            if server.failure:
                raise WorkerError(server.failure)
            _say(**_standing(server.status()))


def _standing(status: "MasterStatus") -> dict[str, Any]:
    """Return what is of interest of the master's status."""
    return {
        "version": status.version,
        "left_out": status.left_out,
        "states": {one.name: one.state for one in status.clusters} | {one.name: one.state for one in status.shards},
        "tokens_counted": {one.name: one.tokens for one in status.clusters},
        "shard_versions": {one.name: one.versions for one in status.shards},
        "shard_endpoints": {one.name: one.endpoint for one in status.shards},
        "moving": sorted({(one.cluster, one.way) for one in status.transfers}),
        "samples_counted": status.chunks.counted_samples if status.chunks else 0,
    }


def _shard(order: Mapping[str, Any], stop: threading.Event) -> None:
    from spantrain.outer.shard.server import ShardServer, master_link
    from spantrain.outer.shard.snapshots import FolderSnapshots

    server = ShardServer(
        name=order["name"],
        bind=f"tcp://{order['address']}:0",
        snapshots=FolderSnapshots(Path(order["snapshots"])),
        link_of=master_link(address=order["master"], token=order["token"], name=order["name"]),
        encrypted=order["encrypted"],
    )
    with server:
        _say(endpoint=server.endpoint)
        while not stop.wait(_LOOK_EVERY_S):
            if server.failure:
                raise WorkerError(server.failure)


def _cluster(order: Mapping[str, Any], stop: threading.Event) -> None:
    from spantrain_studies.outer_demo.training import ClusterOrder, train_cluster

    train_cluster(ClusterOrder(**order), stop, _say)


if __name__ == "__main__":
    main()
