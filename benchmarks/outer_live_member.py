"""One process of a live comparison of ways to train over clusters: what `outer_live.py` starts on the testbed.

The first line of input is JSON and says what to be. A cluster says `ready`, begins when it is told to, takes inner
steps that last as long as it was told, exchanges a model of zeros by the method, and says what came of it. A master and
shards serve until their input ends.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spantrain_studies.outer.case import equal_layers

PATIENCE = timedelta(seconds=300)


class Method(Protocol):
    """How a cluster exchanges."""

    @property
    def comm_s(self) -> float:
        """How long parameters were under way."""

    @property
    def rounds(self) -> int:
        """Exchanges."""

    def over(self, late: bool) -> bool:
        """Whether to end; `late`: this cluster's time is over."""

    def stepped(self, number: int) -> None:
        """Do what follows an inner step."""

    def ended(self) -> None:
        """Come to an end with the others."""


def say(**message: Any) -> None:
    """Print a line."""
    os.write(1, json.dumps(message).encode() + b"\n")


def model_of(order: dict[str, Any]) -> dict[str, Tensor]:
    """Return parameters of the size that was told."""
    layers = equal_layers(order["layers"], order["model_bytes"])
    return {one.name: torch.zeros(one.shape) for layer in layers for one in layer.parameters}


class Agreed:
    """Those that wait for each other end after the same round: the one at whose end the first one's time is over."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._late = self._over = False

    def before(self, number: int) -> None:
        """Say how it stands, before a round's exchange."""
        if self._rank == 0:
            self._store.set(f"over {number}", "yes" if self._late else "no")

    def after(self, number: int) -> None:
        """Hear it, after the exchange."""
        self._over = self._store.get(f"over {number}") == b"yes"

    def over(self, late: bool) -> bool:
        """Whether to end."""
        self._late = late
        return self._over


class Ours:
    """The outer optimizer."""

    def __init__(self, order: dict[str, Any]) -> None:
        from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions

        layers = {name.split(".")[0]: [name] for name in model_of(order)}
        self._tokens = order["tokens_per_step"]
        self._outer = OuterOptimizer(
            model_of(order),
            master=order["master"],
            token=order["token"],
            cluster=order["name"],
            inner_steps=order["inner_steps"],
            options=OuterOptions(layers=layers),
        )
        self._before = self._outer.metrics

    @property
    def comm_s(self) -> float:
        """With parameters under way."""
        return self._outer.metrics.comm_s - self._before.comm_s

    @property
    def rounds(self) -> int:
        """That were counted."""
        return self._outer.metrics.outer_rounds

    def over(self, late: bool) -> bool:
        """End when it is time."""
        return late

    def stepped(self, number: int) -> None:
        """Tell it of a step."""
        del number
        self._outer.step(tokens=self._tokens)

    def ended(self) -> None:
        """Leave."""
        self._outer.close()


class Sums:
    """`dp` and `diloco`: an all-reduce of all, every so many steps."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._agreed = Agreed(join(order), order["rank"])
        self.over = self._agreed.over
        self._flat = torch.zeros(order["model_bytes"] // 4)
        self._every = 1 if order["method"] == "dp" else order["inner_steps"]
        self.comm_s, self.rounds = 0.0, 0

    def stepped(self, number: int) -> None:
        """Wait for all, sum."""
        if number % self._every:
            return
        self._agreed.before(number)
        dist.barrier()
        begun_s = time.monotonic()
        dist.all_reduce(self._flat)
        self.comm_s += time.monotonic() - begun_s
        self.rounds += 1
        self._agreed.after(number)

    def ended(self) -> None:
        """Leave together."""
        dist.barrier()
        dist.destroy_process_group()


class Tickets:
    """`async-diloco`: whoever has a round to give takes a number, and all sum the numbers in their order."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._store = join(order)
        # Whoever waits for a key keeps its connection to the store from others.
        host, port = order["store"].rsplit(":", 1)
        self._line = dist.TCPStore(host, int(port), is_master=False, timeout=PATIENCE)
        self._flat = torch.zeros(order["model_bytes"] // 4)
        self._every, self._count = order["inner_steps"], order["clusters"]
        self._done = threading.Condition()
        self._last = 0
        self.comm_s, self.rounds = 0.0, 0
        self._thread = threading.Thread(target=self._serve, name="sums", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        number = ends = 0
        while ends < self._count:
            number += 1
            if self._line.get(f"ticket {number}") == b"end":
                ends += 1
            else:
                begun_s = time.monotonic()
                dist.all_reduce(self._flat)
                self.comm_s += time.monotonic() - begun_s
            with self._done:
                self._last = number
                self._done.notify_all()

    def _take(self, what: str) -> int:
        number = self._store.add("tickets", 1)
        self._store.set(f"ticket {number}", what)
        return number

    def over(self, late: bool) -> bool:
        """End when it is time."""
        return late

    def stepped(self, number: int) -> None:
        """Wait for the sum of one's own number."""
        if number % self._every == 0:
            mine = self._take("sum")
            with self._done:
                self._done.wait_for(lambda: self._last >= mine)
            self.rounds += 1

    def ended(self) -> None:
        """Take part until all have ended."""
        self._take("end")
        self._thread.join()


class Torchft:
    """DiLoCo of the torchft package, as its documentation uses it: a lighthouse, a manager for each cluster, Gloo."""

    def __init__(self, order: dict[str, Any]) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        os.environ |= {"TORCHFT_LIGHTHOUSE": order["lighthouse"], "GLOO_SOCKET_IFNAME": order["interface"]}
        parts = model_of(order)
        self._model = nn.ParameterList(list(parts.values()))
        inner = torch.optim.SGD(self._model.parameters(), lr=0.1)
        outer = torch.optim.SGD(self._model.parameters(), lr=0.7, momentum=0.8, nesterov=True)
        store = dist.TCPStore(order["address"], 0, is_master=True, timeout=PATIENCE, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE), min_replica_size=order["clusters"], load_state_dict=lambda _: None,
            state_dict=dict, store_addr=order["address"], store_port=store.port, rank=0, world_size=1,
            replica_id=order["name"], use_async_quorum=False, timeout=PATIENCE, quorum_timeout=PATIENCE,
            hostname=order["address"], init_sync=False,
        )  # fmt: skip
        self._store, self._inner, self._stack = store, inner, contextlib.ExitStack()
        self._stack.enter_context(DiLoCo(self._manager, [self._model], inner, outer, sync_every=order["inner_steps"]))
        self._every = order["inner_steps"]
        for one in self._model.parameters():
            one.grad = torch.zeros_like(one)
        self._shared, self._rank, self._count = shared_store(order), order["rank"], order["clusters"]
        self._agreed = Agreed(self._shared, self._rank)
        self.over = self._agreed.over
        self.comm_s, self.rounds = 0.0, 0

    def stepped(self, number: int) -> None:
        """Take the inner optimizer's step, of which its hook makes the exchange."""
        ends = number % self._every == 0
        if ends:
            self._agreed.before(number)
        begun_s = time.monotonic()
        self._inner.step()
        if ends:
            self.comm_s += time.monotonic() - begun_s
            self.rounds += 1
            self._agreed.after(number)

    def ended(self) -> None:
        """Leave, without what its manager would still wait for; the first when all have heard that it is over."""
        self._shared.set(f"left {self._rank}", "yes")
        if self._rank == 0:
            self._shared.wait([f"left {rank}" for rank in range(self._count)])
        os._exit(0)


METHODS = {"outer": Ours, "dp": Sums, "diloco": Sums, "async-diloco": Tickets, "torchft-diloco": Torchft}


def shared_store(order: dict[str, Any]) -> dist.Store:
    """Return a store that all clusters share; the first one serves it."""
    host, port = order["store"].rsplit(":", 1)
    return dist.TCPStore(host, int(port), order["clusters"], is_master=order["rank"] == 0, timeout=PATIENCE)


def join(order: dict[str, Any]) -> dist.Store:
    """Begin a process group over the testbed's network; return its store."""
    os.environ["GLOO_SOCKET_IFNAME"] = order["interface"]
    store, count = shared_store(order), order["clusters"]
    group = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=order["rank"], world_size=count, timeout=PATIENCE)
    return store


def end_with(orders: FileIO) -> None:
    """End at once when there is nobody any more to give orders."""
    while orders.readline():
        pass
    os._exit(1)


def train(order: dict[str, Any], orders: FileIO) -> None:
    """Be a cluster."""
    torch.set_num_threads(1)
    method: Method = METHODS[order["method"]](order)
    say(ready=True)
    if not orders.readline():
        return  # whoever asked for it is gone
    threading.Thread(target=end_with, args=(orders,), daemon=True).start()
    begun_s = now_s = time.monotonic()
    end_s = begun_s + order["seconds"]
    steps, train_s = 0, 0.0
    while not method.over(now_s >= end_s):
        due_s = now_s + order["step_s"]
        time.sleep(max(0.0, due_s - time.monotonic()))
        steps, train_s, ended_s = steps + 1, train_s + order["step_s"], time.monotonic()
        method.stepped(steps)
        # What sleeping took too long is not the method's; what follows the step is.
        now_s = due_s + time.monotonic() - ended_s
    figures = {"rounds": method.rounds, "comm_s": method.comm_s}
    say(steps=steps, train_s=train_s, span_s=now_s - begun_s, **figures)
    method.ended()


def serve(order: dict[str, Any]) -> Iterator[None]:
    """Be a master or a shard."""
    if order["role"] == "master":
        from spantrain.outer.master.config import MasterConfig
        from spantrain.outer.master.server import MasterServer
        from spantrain.outer.policy.settings import OuterSettings

        config = MasterConfig(shards=tuple(order["shards"]), settings=OuterSettings(grace_s=order["grace_s"]))
        with MasterServer(bind=order["bind"], state_dir=Path(order["folder"]), config=config) as server:
            say(address=server.address, token=server.token)
            yield
            say(versions=server.status().version)
    else:
        from spantrain.outer.shard.server import ShardServer, master_link
        from spantrain.outer.shard.snapshots import FolderSnapshots

        link = master_link(address=order["master"], token=order["token"], name=order["name"])
        bind, snapshots = f"tcp://{order['address']}:0", FolderSnapshots(Path(order["folder"]))
        with ShardServer(name=order["name"], bind=bind, snapshots=snapshots, link_of=link):
            say(ready=True)
            yield


def main() -> None:
    """Be what the first line says."""
    orders = FileIO(sys.stdin.fileno(), closefd=False)  # a thread that reads sys.stdin aborts an interpreter that ends
    order = json.loads(orders.readline())
    if order["role"] == "cluster":
        train(order, orders)
        return
    for _ in serve(order):
        orders.readline()


if __name__ == "__main__":
    main()
