"""A master, with made-up clusters and shards, and a network that may fail: the caller says what happens next."""

from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import TransferWay, of_fragment
from spantrain.core.outer.layers import Layer, ParameterSpec, divide, fragment_layouts
from spantrain.outer.policy.chunks import ChunkState
from spantrain.outer.policy.fragments import FragmentedMaster, FragmentedState
from spantrain.outer.policy.master import OuterMaster
from spantrain.outer.policy.settings import OuterSettings
from testing.outer.members import Content, Lesson, MadeUpCluster, MadeUpShard, Sample, samples_of


def layers_of(*sizes: int) -> tuple[Layer, ...]:
    return tuple(
        Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.weight", shape=(size,)),))
        for k, size in enumerate(sizes)
    )


class MadeUpWorld:
    """A master, shards, clusters, and messages on their way, each line in order; the caller says what moves next."""

    def __init__(self, clusters: int, shards: int, *, settings: OuterSettings, samples: int, chunks: int) -> None:
        self.settings, self.fragments = settings, settings.fragments
        names = [f"s{k}" for k in range(shards)]
        layers = layers_of(*range(1, 2 * shards * self.fragments + 2))
        self.layout = divide(layers, names, fragments=self.fragments)
        parts = fragment_layouts(self.layout, self.fragments)
        self.now_s = 0.0
        self.saved = FragmentedState.of(self.fragments, ChunkState(samples=samples, chunks=chunks, passes=1))
        self.lines: dict[str, deque[Any]] = defaultdict(deque)
        """To the master under 'up name', to members under their names."""
        self.memories = {
            name: tuple(MadeUpShard(name, part.layers_of(name), counts_samples=part is parts[0]) for part in parts)
            for name in names
        }
        """Of shards, for each fragment."""
        halves = tuple(len(part.layers) // 2 for part in parts)
        workers = tuple(
            {"w0": tuple(range(half)), "w1": tuple(range(half, len(part.layers)))}
            for half, part in zip(halves, parts, strict=True)
        )
        self.clusters = {f"c{k}": MadeUpCluster(f"c{k}", workers) for k in range(clusters)}
        self.down: set[str] = set()
        self.attached: set[tuple[str, int]] = set()
        """Members and fragments whose newest connection the master knows: its commands go there, or nowhere."""
        self.lost_work = False
        """Whether something died that held what nobody else did."""
        self.left_out_of: tuple[set[Lesson], ...] = tuple(set() for _ in parts)
        """By fragment."""
        self.whole: FragmentedMaster
        self.start_master()

    @property
    def master(self) -> OuterMaster:
        """Of the first fragment, which is all where there is one."""
        return self.whole.parts[0]

    @property
    def shards(self) -> dict[str, MadeUpShard]:
        """What they have of the first fragment."""
        return {name: memories[0] for name, memories in self.memories.items()}

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.memories, *self.clusters)

    def tell(self, event: Any) -> None:
        """Give the master an event now, and put its commands in line."""
        if isinstance(event, on.ClusterRegistered | on.ShardRegistered):
            ((_, name),) = event.speakers
            self.attached.add((name, event.fragment))
        had_parameters = [part.state.seeded for part in self.whole.parts]
        commands = self.whole.on_event(self.now_s, event)
        for k, part in enumerate(self.whole.parts):
            if had_parameters[k] and not part.state.seeded:
                for memories in self.memories.values():
                    memories[k].all_was_lost = True
        for command in commands:
            if isinstance(command, do.Save):
                self._save()
            for name in command.recipients:
                if (name, command.fragment) in self.attached:
                    self.lines[name].append(command)

    def _save(self) -> None:
        kept = from_json(FragmentedState, to_json(self.whole.state), "a saved master")
        for new, old in zip(kept.fragments, self.saved.fragments, strict=True):
            assert new.version >= old.version
        self.saved = kept

    def deliver(self, line: str) -> None:
        """Let the first message of a line arrive."""
        message = self.lines[line].popleft()
        if line.startswith("up "):
            for event in message if isinstance(message, tuple) else (message,):
                self.tell(event)
        elif line not in self.down:
            self._answer(line, self._heard(line, message))

    def _answer(self, name: str, said: list[Any]) -> None:
        """Send layers, and put events in line to the master."""
        for one in said:
            if isinstance(one, do.SendLayer):
                cluster, number = self.clusters[name], self._fragment_of(one.transfer)
                content = cluster.content(number, parameters=one.parameters)
                self.lines[one.transfer.shard].append((one.transfer, content, cluster.spoiled))
                self._answer(name, cluster.sent_layer(number, one.transfer))
            else:
                self.lines[f"up {name}"].append(one)

    def _fragment_of(self, transfer: on.LayerTransfer) -> int:
        return transfer.ticket.number % self.fragments

    def _heard(self, name: str, message: Any) -> list[Any]:
        if name in self.memories:
            return self._shard_heard(name, message)
        if isinstance(message, do.RegisterAgain):
            self.connect(name)
            return []
        if isinstance(message, tuple):
            transfer, version, content = message
            return self.clusters[name].got_layer(self._fragment_of(transfer), transfer, version, content)
        return self.clusters[name].on_command(message)

    def _shard_heard(self, name: str, message: Any) -> list[Any]:
        if isinstance(message, tuple):
            return [self._took_layer(name, *message)]
        number, command = message.fragment, message
        memory = self.memories[name][number]
        match command:
            case do.RegisterAgain():
                self.connect(name)
                return []
            case do.Restore() if command.source not in memory.can_restore():
                self.connect(name)
                return []
            case do.Move(way=TransferWay.PULL):
                content = memory.can_restore()[command.version]
                self.lines[command.transfer.cluster].append((command.transfer, command.version, content))
                return []
        answer = memory.on_command(command)
        return [of_fragment(number, answer)] if answer else []

    def _took_layer(self, name: str, transfer: on.LayerTransfer, content: Content, spoiled: bool) -> Any:
        number = self._fragment_of(transfer)
        memory = self.memories[name][number]
        memory.pushes.setdefault(transfer.ticket, {})[transfer.layer] = content
        if spoiled:
            memory.spoiled.add(transfer.ticket)
            self.left_out_of[number].update(content)
        return of_fragment(number, on.Moved(way=TransferWay.PUSH, transfer=transfer))

    def start_master(self) -> None:
        """Start it from what was saved last; every connection is new."""
        self.whole = FragmentedMaster(self.layout, self.settings, self.saved, now_s=self.now_s)
        for name in self.members:
            self.connect(name)

    def connect(self, name: str) -> None:
        """Give a member that lives a new connection: what was on its way is lost. It registers with all at once."""
        self.attached -= {(name, number) for number in range(self.fragments)}
        for line in (name, f"up {name}"):
            self.lines[line].clear()
        for line in self.lines.values():
            kept = [m for m in line if not _is_layer_of(name, m)]
            line.clear()
            line.extend(kept)
        if name in self.down:
            return
        if name in self.clusters:
            said = self.clusters[name].registered()
        else:
            said = [of_fragment(number, memory.registered()) for number, memory in enumerate(self.memories[name])]
        self.lines[f"up {name}"].append(tuple(said))

    def kill(self, name: str) -> None:
        self.down.add(name)
        self.connect(name)
        if name in self.memories:
            for memory in self.memories[name]:
                self.lost_work |= bool(memory.can_restore())
                memory.lost_memory()
        else:
            before = self.clusters[name]
            self.clusters[name] = MadeUpCluster(name, before.workers, life=before.life + 1)

    def revive(self, name: str) -> None:
        self.down.discard(name)
        self.connect(name)

    def snapshot(self, name: str) -> None:
        """Let a shard write down what it serves, and tell of it."""
        for number, memory in enumerate(self.memories[name]):
            if memory.serving is not None:
                memory.snapshots = {memory.serving: memory.versions[memory.serving]}
                self.lines[f"up {name}"].append(of_fragment(number, memory.beat()))

    def beat(self, name: str) -> None:
        if name in self.clusters:
            self.tell(on.ClusterBeat(cluster=name))
            return
        for number, memory in enumerate(self.memories[name]):
            self.tell(of_fragment(number, memory.beat()))

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
        """What holds at any time: a version of a fragment has one content, wherever it is."""
        contents: dict[tuple[int, int], set[Content]] = defaultdict(set)
        for memories in self.memories.values():
            for number, memory in enumerate(memories):
                for version, content in {**memory.snapshots, **memory.versions}.items():
                    contents[number, version].add(content)
        mixed = [version for version, found in contents.items() if len(found) > 1]
        assert not mixed, f"fragments and versions with two contents: {mixed}"

    def lessons(self, number: int) -> Content:
        """Return what the newest version of a fragment learned from."""
        memories = [memories[number] for memories in self.memories.values()]
        contents = {memory.versions[memory.serving] for memory in memories if memory.serving is not None}
        assert len(contents) == 1
        return contents.pop()

    @property
    def learned(self) -> frozenset[Sample]:
        """Samples that the newest version of the first fragment learned from."""
        return samples_of(self.lessons(0))

    @property
    def left_out(self) -> frozenset[Sample]:
        """Samples that were in pushes of the first fragment that are not finite."""
        return samples_of(self.left_out_of[0])


def _is_layer_of(name: str, message: Any) -> bool:
    """Whether a message is a layer that comes from a member or goes to it."""
    if not (isinstance(message, tuple) and isinstance(message[0], on.LayerTransfer)):
        return False
    return name in (message[0].cluster, message[0].shard)


def without_clip(**more: Any) -> OuterSettings:
    return replace(OuterSettings(clip_norm=None, lease_s=1e6, transfer_limit_s=1e6), **more)
