"""Clusters and shards that hold no numbers, only the names of what went into them, and a network that may fail."""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spantrain.config.artefacts import from_json
from spantrain.config.json_codec import to_json
from spantrain.core import outer_commands as do
from spantrain.core import outer_events as on
from spantrain.core.outer_events import Lease, Ticket, Way
from spantrain.core.outer_layers import Layer, ParameterSpec
from spantrain.policy.outer.chunks import ChunkState
from spantrain.policy.outer.client import ClientPhase, OuterClient
from spantrain.policy.outer.layout import divide
from spantrain.policy.outer.master import OuterMaster
from spantrain.policy.outer.settings import MasterState, OuterSettings

Sample = tuple[int, int, int]
"""Pass over the data, chunk, sample."""
Content = frozenset[Sample]
"""What parameters have learned from."""


def layers_of(*sizes: int) -> tuple[Layer, ...]:
    return tuple(
        Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.weight", shape=(size,)),))
        for k, size in enumerate(sizes)
    )


@dataclass
class MadeUpShard:
    """Holds, for each version, what all pushes in it had learned; snapshots outlive it."""

    name: str
    layers: range
    versions: dict[int, Content] = field(default_factory=dict)
    staged: tuple[int, Content] | None = None
    pushes: dict[Ticket, dict[int, Content]] = field(default_factory=dict)
    means: dict[Ticket, Content] = field(default_factory=dict)
    serving: int | None = None
    snapshots: dict[int, Content] = field(default_factory=dict)
    spoiled: set[Ticket] = field(default_factory=set)
    """Pushes whose numbers are not finite."""
    all_was_lost: bool = False
    """Whether shards once had no version left together: what went into the last may then be pushed again."""

    def can_restore(self) -> dict[int, Content]:
        return {**self.snapshots, **self.versions, **(dict([self.staged]) if self.staged else {})}

    def registered(self) -> list[Any]:
        self.pushes, self.means = {}, {}
        return [on.ShardRegistered(shard=self.name, versions=tuple(self.can_restore()))]

    def lost_memory(self) -> None:
        self.versions, self.staged, self.pushes, self.means, self.serving = {}, None, {}, {}, None

    def on_command(self, command: Any) -> list[Any]:
        match command:
            case do.CheckPush():
                whole = self.pushes.get(command.push, {}).keys() == set(self.layers)
                return [on.PushChecked(shard=self.name, push=command.push, complete=whole)]
            case do.Forget():
                self.pushes.pop(command.ticket, None)
                if self.means.pop(command.ticket, None) is not None:
                    self.staged = None
            case do.Measure():
                squares = {
                    push: tuple(float("nan") if push in self.spoiled else 1.0 for _ in self.layers)
                    for push in command.pushes
                }
                return [on.NormsMeasured(shard=self.name, update=command.update, squares=squares)]
            case do.Combine():
                assert not self.spoiled.intersection(one.push for one in command.weights)
                learned = [content for one in command.weights for content in {*self.pushes[one.push].values()}]
                assert len(learned) == len(command.weights), "all layers of a push are of one push"
                twice = sum(map(len, learned)) > len(frozenset().union(*learned))
                assert self.all_was_lost or not twice, "nothing twice in an update"
                self.means[command.update] = frozenset().union(*learned)
                squares = tuple(1.0 for _ in self.layers)
                return [on.MeanCombined(shard=self.name, update=command.update, squares=squares)]
            case do.Stage():
                self.staged = (command.version, self._next(command))
                return [on.Staged(shard=self.name, update=command.update)]
            case do.Commit():
                assert self.staged
                assert self.staged[0] == command.version
                kept = {version: self.versions[version] for version in command.keep if version in self.versions}
                self.versions = {**kept, command.version: self.staged[1]}
                self.serving, self.staged = command.version, None
                return [on.Committed(shard=self.name, version=command.version, versions=tuple(self.can_restore()))]
            case do.Restore():
                self.versions = {command.version: self.can_restore()[command.source]}
                self.serving, self.staged = command.version, None
                self.pushes, self.means = {}, {}
                return [on.Restored(shard=self.name, version=command.version, versions=tuple(self.can_restore()))]
        return []

    def _next(self, command: do.Stage) -> Content:
        if command.parameters:
            (content,) = {*self.pushes[command.parameters].values()}
            return content
        assert self.serving is not None
        before, mean = self.versions[self.serving], self.means[command.update]
        assert self.all_was_lost or not before & mean, "no sample is learned from twice"
        return before | mean


class MadeUpCluster:
    """Trains on what it has on lease, pushes when told to, keeps what was not counted; its protocol is the real one."""

    def __init__(self, name: str, workers: Mapping[str, tuple[int, ...]]) -> None:
        self.name, self.workers = name, workers
        self.client = OuterClient(name, workers)
        self.start: Content = frozenset()
        self.learned: Content = frozenset()
        """Since the start, and not known to be counted."""
        self.payload: Content = frozenset()
        """What it had learned when it asked for its push."""
        self.leases: dict[int, Lease] = {}
        self.reached: dict[int, int] = {}
        self.spoiled = False
        """Whether its numbers are not finite."""
        self.pulled: dict[int, Content] = {}

    @property
    def base(self) -> int:
        return self.client.version

    def registered(self) -> list[Any]:
        self.pulled = {}
        return self._do(self.client.registered(tuple(self.leases)))

    def train(self) -> list[Any]:
        """Learn from one sample, or ask for data."""
        for number, lease in self.leases.items():
            if self.reached[number] < lease.end:
                self.learned |= {(lease.data_pass, lease.chunk, self.reached[number])}
                self.reached[number] += 1
                return []
        return [on.ChunkAsked(cluster=self.name)]

    def ask(self, *, ends_round: bool = False) -> list[Any]:
        """Ask for a push, where there is something to give and none under way."""
        if self.client.phase is not ClientPhase.FREE or not (self.learned or self.base == 0):
            return []
        self.payload = self.learned
        progress = tuple(on.Progress(lease=number, upto=upto) for number, upto in sorted(self.reached.items()))
        return self._do(self.client.ask(tokens=len(self.learned), progress=progress, ends_round=ends_round))

    def on_command(self, command: Any) -> list[Any]:
        match command:
            case do.LeaseChunk():
                self.leases[command.lease.number] = command.lease
                self.reached[command.lease.number] = command.lease.begin
            case do.StartPull():
                self.pulled = {}
            case do.EndRound():
                ended = self.client.is_to_end(command)
                return (self.ask() or self._do(self.client.keep_round())) if ended else []
        said = self._do(self.client.on_command(command))
        return said + (self.ask() if isinstance(command, do.Welcome) and command.version is None else [])

    def sent_layer(self, transfer: on.Transfer) -> list[Any]:
        return self._do(self.client.sent(transfer))

    def got_layer(self, transfer: on.Transfer, version: int, content: Content) -> list[Any]:
        if self.client.pull and self.client.pull.pull == transfer.ticket:
            assert version == self.client.pull.version
            self.pulled[transfer.layer] = content
        return self._do(self.client.arrived(transfer))

    def _do(self, said: list[Any]) -> list[Any]:
        """Do what the client commands; return what is for the master, and layers to send."""
        for one in said:
            if isinstance(one, do.UseVersion):
                self._use(one)
        return [one for one in said if not isinstance(one, do.SkipPush | do.UseVersion)]

    def _use(self, command: do.UseVersion) -> None:
        """Begin from the new version; drop what is counted."""
        contents = {*self.pulled.values()}
        assert len(contents) == 1, "a pull never mixes two versions"
        if command.counted:
            self.learned -= self.payload
            self._finish_leases()
        self.start, self.pulled = contents.pop(), {}

    def _finish_leases(self) -> None:
        whole = [number for number, lease in self.leases.items() if self.reached[number] == lease.end]
        for number in whole:
            if not any((self.leases[number].data_pass, self.leases[number].chunk) == one[:2] for one in self.learned):
                del self.leases[number], self.reached[number]


class MadeUpWorld:
    """A master, shards, clusters, and messages on their way, each line in order; the caller says what moves next."""

    def __init__(self, clusters: int, shards: int, *, settings: OuterSettings, samples: int, chunks: int) -> None:
        layers = layers_of(*range(1, 2 * shards + 2))
        self.layout = divide(layers, [f"s{k}" for k in range(shards)])
        self.settings = settings
        self.now_s = 0.0
        self.saved = MasterState(chunks=ChunkState.of(samples, chunks, passes=1))
        self.up: deque[Any] = deque()
        self.lines: dict[str, deque[Any]] = defaultdict(deque)
        """To the master under ('up', name), to members under their names."""
        self.shards = {run.shard: MadeUpShard(run.shard, run.layers) for run in self.layout.runs}
        half = len(layers) // 2
        workers = {"w0": tuple(range(half)), "w1": tuple(range(half, len(layers)))}
        self.clusters = {f"c{k}": MadeUpCluster(f"c{k}", workers) for k in range(clusters)}
        self.down: set[str] = set()
        self.attached: set[str] = set()
        """Members whose newest connection the master knows: its commands go there, or nowhere."""
        self.lost_work = False
        """Whether something died that held what nobody else did."""
        self.left_out: set[Sample] = set()
        self.versions: list[int] = []
        self.master: OuterMaster
        self.start_master()

    @property
    def members(self) -> dict[str, MadeUpShard | MadeUpCluster]:
        return {**self.shards, **self.clusters}

    def tell(self, event: Any) -> None:
        """Give the master an event now, and put its commands in line."""
        if isinstance(event, on.ClusterRegistered | on.ShardRegistered):
            self.attached.add(event.cluster if isinstance(event, on.ClusterRegistered) else event.shard)
        had_parameters = self.master.state.seeded
        commands = self.master.on_event(self.now_s, event)
        if had_parameters and not self.master.state.seeded:
            for shard in self.shards.values():
                shard.all_was_lost = True
        for command in commands:
            if isinstance(command, do.Save):
                kept = from_json(MasterState, to_json(self.master.state), "a saved master")
                assert kept.version >= self.saved.version
                self.saved = kept
            for name in self.attached.intersection(self._ends(command)):
                self.lines[name].append(command)

    def _ends(self, command: Any) -> list[str]:
        if isinstance(command, do.Save):
            return []
        if isinstance(command, do.Move):
            return [command.transfer.shard if command.way is Way.PULL else command.transfer.cluster]
        return [getattr(command, end) for end in ("cluster", "shard", "member") if hasattr(command, end)]

    def deliver(self, line: str) -> None:
        """Let the first message of a line arrive."""
        message = self.lines[line].popleft()
        if line.startswith("up "):
            self.tell(message)
        elif line not in self.down:
            self._answer(line, self._heard(line, message))

    def _answer(self, name: str, said: list[Any]) -> None:
        """Send layers, and put events in line to the master."""
        for one in said:
            if isinstance(one, do.SendLayer):
                cluster = self.clusters[name]
                content = cluster.start | cluster.payload if one.parameters else cluster.payload
                self.lines[one.transfer.shard].append((one.transfer, content, cluster.spoiled))
                self._answer(name, cluster.sent_layer(one.transfer))
            else:
                self.lines[f"up {name}"].append(one)

    def _heard(self, name: str, message: Any) -> list[Any]:
        member = self.members[name]
        match message:
            case do.RegisterAgain():
                self.connect(name)
                return []
            case do.Restore() if message.source not in member.can_restore():
                self.connect(name)
                return []
            case do.Move(way=Way.PULL):
                self.lines[message.transfer.cluster].append(
                    (message.transfer, message.version, member.can_restore()[message.version])
                )
                return []
            case (transfer, content, bool() as spoiled):
                member.pushes.setdefault(transfer.ticket, {})[transfer.layer] = content
                if spoiled:
                    member.spoiled.add(transfer.ticket)
                    self.left_out |= content
                return [on.Moved(way=Way.PUSH, transfer=transfer)]
            case (transfer, int() as version, content):
                return member.got_layer(transfer, version, content)
        return member.on_command(message)

    def start_master(self) -> None:
        """Start it from what was saved last; every connection is new."""
        self.master = OuterMaster(self.layout, self.settings, self.saved, now_s=self.now_s)
        for name in self.members:
            self.connect(name)

    def connect(self, name: str) -> None:
        """Give a member that lives a new connection: what was on its way is lost."""
        self.attached.discard(name)
        for line in (name, f"up {name}"):
            self.lines[line].clear()
        for line in self.lines.values():
            kept = [m for m in line if not (isinstance(m, tuple) and name in (m[0].cluster, m[0].shard))]
            line.clear()
            line.extend(kept)
        if name not in self.down:
            self.lines[f"up {name}"].extend(self.members[name].registered())

    def kill(self, name: str) -> None:
        self.down.add(name)
        self.connect(name)
        if name in self.shards:
            self.lost_work |= bool(self.shards[name].can_restore())
            self.shards[name].lost_memory()
        else:
            before = self.clusters[name]
            self.clusters[name] = MadeUpCluster(name, before.workers)

    def revive(self, name: str) -> None:
        self.down.discard(name)
        self.connect(name)

    def snapshot(self, name: str) -> None:
        shard = self.shards[name]
        if shard.serving is not None:
            shard.snapshots = {shard.serving: shard.versions[shard.serving]}
            self.lines[f"up {name}"].append(on.ShardBeat(shard=name, versions=tuple(shard.can_restore())))

    def beat(self, name: str) -> None:
        if name in self.shards:
            self.tell(on.ShardBeat(shard=name, versions=tuple(self.shards[name].can_restore())))
        else:
            self.tell(on.ClusterBeat(cluster=name))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in pieces short enough that only those that are down are missed."""
        for _ in range(int(8 * seconds / self.settings.lost_after_s) + 1):
            self.now_s += self.settings.lost_after_s / 8
            for name in self.members:
                if name not in self.down:
                    self.beat(name)
            self.tell(on.Ticked())

    @property
    def busy_lines(self) -> list[str]:
        return sorted(name for name, line in self.lines.items() if line)

    def settle(self) -> None:
        """Let all messages arrive that are on their way, and those that they bring about."""
        for _ in range(20_000):
            busy = self.busy_lines
            if not busy:
                return
            self.deliver(busy[0])
        raise AssertionError("messages never end")

    def check(self) -> None:
        """What holds at any time: a version has one content, wherever it is."""
        contents: dict[int, set[Content]] = defaultdict(set)
        for shard in self.shards.values():
            for version, content in {**shard.snapshots, **shard.versions}.items():
                contents[version].add(content)
        mixed = [version for version, found in contents.items() if len(found) > 1]
        assert not mixed, f"versions with two contents: {mixed}"

    @property
    def learned(self) -> Content:
        """What the newest version learned from."""
        contents = {shard.versions[shard.serving] for shard in self.shards.values() if shard.serving is not None}
        assert len(contents) == 1
        return contents.pop()


def without_clip(**more: Any) -> OuterSettings:
    return replace(OuterSettings(clip_norm=None, lease_s=1e6, transfer_limit_s=1e6), **more)
