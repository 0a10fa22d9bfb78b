"""A master and shards of one process for real clients: real tensors, real policies, one thread, faults on demand."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import TransferWay, of_fragment
from spantrain.core.outer.layers import Layer, divide, fragment_layouts
from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.policy.chunks import ChunkState
from spantrain.outer.policy.fragments import FragmentedMaster, FragmentedState
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.shard import OuterShard
from spantrain.transport.layers.interface import LayerKey
from spantrain_studies.outer.plain import MemorySnapshots
from testing.patience import PATIENCE_S

EXACT = Nesterov(learning_rate=1.0, momentum=0.0)
"""With it the shards hold the mean of what clusters have."""


class MadeUpServer:
    """Everything happens in one thread, in order; `hook` sees each command on its way and may call faults below."""

    def __init__(
        self, *, shards: int = 2, rule: Nesterov = EXACT, settings: OuterSettings | None = None,
        samples: int = 0, chunks: int = 0, passes: int | None = 1, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Begin; by a `clock` that stands still, what clusters say of their tokens counts however fast they come."""
        self._clock = clock
        self.rule, self.settings = rule, settings or OuterSettings(clip_norm=None, grace_s=0.0)
        self.names = [f"s{k}" for k in range(shards)]
        self.samples, self.chunks = samples, chunks
        leased = ChunkState(samples=samples, chunks=chunks, passes=passes) if samples else None
        self.fragments = self.settings.fragments
        self.saved = FragmentedState.of(self.fragments, leased)
        self.master: FragmentedMaster | None = None
        self.shards: dict[tuple[str, int], OuterShard] = {}
        """By name and fragment."""
        self.stores = {name: MemorySnapshots() for name in self.names}
        self.sessions: dict[str, Any] = {}
        self.clients: dict[str, Any] = {}
        """Sessions that are connected, by cluster."""
        self.away: set[str] = set()
        """Clusters whose network is cut."""
        self.known: dict[str, tuple[Layer, ...]] = {}
        self.hook: Callable[[Any], bool] = lambda command: True
        """Whether to pass a command on."""
        self.seen: list[str] = []
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # For tests.

    def optimizer(self, parameters: Any, cluster: str, *, inner_steps: int = 2, **options: Any) -> OuterOptimizer:
        connector = MadeUpConnector(self)
        return OuterOptimizer(
            parameters, master="", token="", cluster=cluster, inner_steps=inner_steps,
            options=OuterOptions(connector=connector, **{"wait_for_start_s": PATIENCE_S, **options}),
        )  # fmt: skip

    def do(self, what: Callable[[], Any]) -> Any:
        """Do something in the server's thread; wait for it."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events.put(lambda: answer.put(what()))
        return answer.get(timeout=PATIENCE_S)

    def begin(self, clusters: Iterable[str]) -> None:
        """Have the master know that these train before any of them has made a step: it waits for all from then on."""
        for name in clusters:
            end_s = time.monotonic() + PATIENCE_S
            while not self.do(lambda name=name: self.master and name in self.master.clusters):
                assert time.monotonic() < end_s
                time.sleep(0.001)
            begun = on.TrainingBegun(cluster=name)
            for fragment in range(len(self.master.parts)):
                self.do(partial(self._tell, on.of_fragment(fragment, begun)))

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self.do(lambda: {n: one for s in self.shards.values() for n, one in s.serving.parameters.items()})

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def __enter__(self) -> "MadeUpServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Faults, in the server's thread.

    def cut(self, cluster: str) -> None:
        """Cut a cluster off."""
        self.away.add(cluster)
        session = self.clients.pop(cluster, None)
        if session:
            session.disconnected("cut off")

    def mend(self, cluster: str) -> None:
        self.away.discard(cluster)
        self._join(cluster, self.sessions[cluster])

    def restart_shard(self, name: str) -> None:
        """Lose a shard's memory; its snapshots hold what it served."""
        assert self.master
        self._start_shard(name)
        self._tell(on.ShardLost(shard=name, reason="killed"))
        self._register(name)

    def _start_shard(self, name: str) -> None:
        for k, part in enumerate(fragment_layouts(self.master.layout, self.fragments)):
            store = self.stores[name].of_fragment(k)
            self.shards[name, k] = OuterShard(name, part, rule=self.rule, snapshots=store)

    def _register(self, name: str) -> None:
        for k in range(self.fragments):
            self._tell(of_fragment(k, self.shards[name, k].registered()))

    def restart_master(self) -> None:
        assert self.master
        self.master = FragmentedMaster(self.master.layout, self.settings, self.saved, now_s=self._clock())
        for name in self.names:
            self._register(name)
        for cluster, session in list(self.clients.items()):
            session.disconnected("the master was killed")
            self._join(cluster, session)

    # The thread.

    def _run(self) -> None:
        while True:
            wake_s = self.master.wake_s if self.master else None
            left_s = None if wake_s is None else max(0.0, wake_s - self._clock())
            try:
                piece = self._events.get(timeout=left_s)
            except queue.Empty:
                self._tell(on.Ticked())
                continue
            if piece is None:
                return
            piece()

    def post(self, piece: Callable[[], Any]) -> None:
        self._events.put(piece)

    def join(self, cluster: str, session: Any, layers: tuple[Layer, ...]) -> None:
        self.sessions[cluster] = session
        self.known[cluster] = layers
        if cluster not in self.away:
            self._join(cluster, session)

    def _join(self, cluster: str, session: Any) -> None:
        if self.master is None:
            layout = divide(self.known[cluster], self.names, fragments=self.fragments)
            self.master = FragmentedMaster(layout, self.settings, self.saved, now_s=self._clock())
            for name in self.names:
                self._start_shard(name)
                self._register(name)
        welcome = MasterWelcome(
            layout=self.master.layout, rule=self.rule, settings=self.settings, peers=(),
            samples=self.samples, chunks=self.chunks,
        )  # fmt: skip
        self.clients[cluster] = session
        for event in session.joined(welcome):
            self._tell(event)

    def hear(self, cluster: str, session: Any, events: Iterable[Any]) -> None:
        """Take what a cluster tells, if it is connected."""
        if self.clients.get(cluster) is session:
            for event in events:
                self._tell(event)

    def _tell(self, event: Any) -> None:
        assert self.master
        self.seen.append(type(event).__name__)
        for command in self.master.on_event(self._clock(), event):
            if isinstance(command, do.Save):
                self.saved = self.master.state
            elif self.hook(command):
                self._pass(command)

    def _pass(self, command: Any) -> None:
        k = command.fragment
        for name in command.recipients:
            self._to_cluster(name, command)
        if isinstance(command, do.ToShard):
            shard = self.shards[command.shard, k]
            answer = shard.on_command(command)
            if isinstance(command, do.Commit) and shard.serving:
                self.stores[command.shard].of_fragment(k).save(shard.serving)
            if answer:
                self.post(lambda: self._tell(of_fragment(k, answer)))

    def _to_cluster(self, cluster: str, command: Any) -> None:
        if cluster in self.clients:
            self.clients[cluster].commanded(command)


class MadeUpConnector:
    """Link and wire of one client."""

    refused = None

    def __init__(self, server: MadeUpServer) -> None:
        self.server = server

    def connect(self, session: Any, cluster: str, layers: tuple[Layer, ...]) -> tuple[Any, Any]:
        self.session, self.cluster, self.layers = session, cluster, layers
        return self, MadeUpWire(self)

    def start(self) -> None:
        self.server.post(lambda: self.server.join(self.cluster, self.session, self.layers))

    def tell(self, *events: Any) -> None:
        self.server.post(lambda: self.server.hear(self.cluster, self.session, events))

    def register_again(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        self.server.post(lambda: self.server.clients.pop(self.cluster, None))


class MadeUpWire:
    """Hands layers over in the server's thread."""

    def __init__(self, of: MadeUpConnector) -> None:
        self.of = of
        self.wanted: dict[LayerKey, Any] = {}

    def set_peers(self, peers: Any) -> None:
        pass

    def expect(self, peer: str, key: LayerKey, parameters: Any) -> None:
        self.of.server.post(lambda: self._give(peer, key))

    def _give(self, peer: str, key: LayerKey) -> None:
        server = self.of.server
        if self.of.cluster not in server.clients:
            return
        k, pull = self._exchange(key)
        if pull is not None:
            tensors = server.shards[peer, k].give(pull.version, key.layer)
            self.of.session.arrived(peer, key, {name: one.clone() for name, one in tensors.items()})

    def _exchange(self, key: LayerKey) -> tuple[int, Any]:
        """Its fragment, and itself; None if it has ended."""
        open_ones = (
            (k, one) for k, part in enumerate(self.of.server.master.parts) for one in part.traffic.under_way.values()
        )
        return next(((k, one) for k, one in open_ones if one.ticket == key.ticket), (0, None))

    def send(self, peer: str, key: LayerKey, tensors: Any) -> None:
        copies = {name: one.clone() for name, one in tensors.items()}
        self.of.server.post(lambda: self._take(peer, key, copies))

    def _take(self, peer: str, key: LayerKey, tensors: Any) -> None:
        server = self.of.server
        k, exchange = self._exchange(key)
        if self.of.cluster not in server.clients or exchange is None:
            return
        transfer = next(
            one for way, one in server.master.lines.moving
            if way is TransferWay.PUSH and (one.ticket, one.layer) == (key.ticket, key.layer)
        )  # fmt: skip
        server.shards[peer, k].take(key.ticket, key.layer, tensors, transfer.wire_format)
        self.of.session.sent(peer, key)
        server._tell(on.Moved(way=TransferWay.PUSH, transfer=transfer))

    def forget(self, ticket: Any) -> None:
        pass

    def close(self) -> None:
        pass


def small_model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=chance), torch.randn(8, 2, generator=chance)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    inputs, targets = batch_of(number)
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def at_once(names: Iterable[str], train: Callable[[str], None]) -> None:
    """Let each cluster train in a thread of its own, to its end; raise what one of them raises."""
    waiting = list(names)
    with ThreadPoolExecutor(len(waiting)) as pool:
        for done in [pool.submit(train, name) for name in waiting]:
            done.result(PATIENCE_S)


def train_together(
    models: Mapping[str, torch.nn.Module],
    outers: Mapping[str, OuterOptimizer],
    tokens: Mapping[str, int],
    *,
    steps: int,
    round_s: float = 0.0,
) -> None:  # fmt: skip
    """Train as `diloco` does, all clusters at once, each with its optimizer and its tokens of a step.

    `round_s`: how long each takes for two steps at least. Of what one says of its tokens a master counts ten times what
    others have in a second, so that rounds of milliseconds count as threads happen to run.
    """

    def train(name: str) -> None:
        inner = torch.optim.SGD(models[name].parameters(), lr=0.1)
        for number in range(steps):
            train_step(models[name], inner, number + 100 * ord(name))
            time.sleep(round_s * (number % 2))
            outers[name].step(tokens=tokens[name])

    at_once(models, train)


def alone(steps: int) -> dict[str, torch.Tensor]:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        train_step(model, inner, number)
    return dict(model.named_parameters())


def close(one: Any, other: Any, *, by: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor.detach(), other[name].detach(), rtol=by, atol=by)


def diloco(rounds: int, tokens: dict[str, int]) -> dict[str, torch.Tensor]:
    shared = small_model(0)
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.8, nesterov=True)
    models = {name: small_model(0) for name in tokens}
    for k in range(rounds):
        for name, model in models.items():
            model.load_state_dict(shared.state_dict())
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in (2 * k, 2 * k + 1):
                train_step(model, inner, number + 100 * ord(name))
        whole = sum(tokens.values())
        for index, one in enumerate(shared.parameters()):
            ends = {name: list(model.parameters())[index] for name, model in models.items()}
            one.grad = sum(tokens[name] / whole * (one.detach() - end.detach()) for name, end in ends.items())
        outer.step()
    return dict(shared.named_parameters())
