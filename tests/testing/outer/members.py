"""Clusters and shards that hold no numbers, only the names of what went into them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import Lease, Ticket, of_fragment
from spantrain.outer.policy.client import ClientPhase, OuterClient
from spantrain_studies.outer.bodies import PlainShard

Sample = tuple[int, int, int]
"""Pass over the data, chunk, sample."""


class Lesson(NamedTuple):
    """A sample, and the life of a cluster that learned from it: one step, which nothing may hold twice."""

    data_pass: int
    chunk: int
    sample: int
    learner: str


Content = frozenset[Lesson]
"""What parameters have learned from."""


def samples_of(content: Iterable[Lesson]) -> frozenset[Sample]:
    return frozenset(lesson[:3] for lesson in content)


class MadeUpShard(PlainShard):
    """Holds, for each version of one fragment, what all pushes in it had learned; snapshots outlive it."""

    def __init__(self, name: str, layers: range, *, counts_samples: bool) -> None:
        """`counts_samples`: data is counted by this fragment's pushes: no sample is in it twice, whoever learned it."""
        super().__init__(name, layers, {})
        self._counts_samples = counts_samples
        self.spoiled: set[Ticket] = set()
        """Pushes whose numbers are not finite."""
        self.all_was_lost = False
        """Whether shards once had no version left together: what went into the last may then be pushed again."""

    def beat(self) -> on.ShardBeat:
        return on.ShardBeat(shard=self._name, versions=self.restorable)

    def lost_memory(self) -> None:
        self.versions, self._staged, self.pushes, self._means, self.serving = {}, None, {}, {}, None

    def _squares(self, push: Ticket) -> tuple[float, ...]:
        return (float("nan") if push in self.spoiled else 1.0,) * len(self._layers)

    def _joined(self, parts: Any) -> Any:
        """Return all of what several have learned; nothing is in two of them."""
        whole = frozenset().union(*parts)
        counted = sum(len(samples_of(one)) if self._counts_samples else len(one) for one in parts)
        twice = counted > (len(samples_of(whole)) if self._counts_samples else len(whole))
        assert self.all_was_lost or not twice, "nothing is learned from twice"
        return whole


class MadeUpPart:
    """A cluster's side of one fragment: keeps what was not counted of it; its protocol is the real one."""

    def __init__(self, name: str, workers: Mapping[str, tuple[int, ...]]) -> None:
        self.client = OuterClient(name, workers)
        self.start: Content = frozenset()
        self.learned: Content = frozenset()
        """Since the start, and not known to be counted."""
        self.payload: Content = frozenset()
        """What it had learned when it asked for its push."""
        self.pulled: dict[int, Content] = {}

    def can_ask(self) -> bool:
        return self.client.phase is ClientPhase.FREE and bool(self.learned or self.client.version == 0)

    def use(self, command: do.UseVersion) -> None:
        """Begin from the new version; drop what is counted."""
        contents = {*self.pulled.values()}
        assert len(contents) == 1, "a pull never mixes two versions"
        if command.counted:
            self.learned -= self.payload
        self.start, self.pulled = contents.pop(), {}


class MadeUpCluster:
    """One life of a cluster: trains on what it has on lease, pushes fragments when told to."""

    def __init__(self, name: str, workers: tuple[Mapping[str, tuple[int, ...]], ...], *, life: int = 0) -> None:
        """`workers`: for each fragment, the layers of each."""
        self.name, self.workers, self.life = name, workers, life
        self.parts = tuple(MadeUpPart(name, one) for one in workers)
        self.leases: dict[int, Lease] = {}
        self.reached: dict[int, int] = {}
        self.spoiled = False
        """Whether its numbers are not finite."""

    @property
    def client(self) -> OuterClient:
        """Of the first fragment, as what follows."""
        return self.parts[0].client

    @property
    def base(self) -> int:
        return self.client.version

    @property
    def pulled(self) -> dict[int, Content]:
        return self.parts[0].pulled

    @property
    def learned(self) -> Content:
        """What is not counted of every fragment."""
        return frozenset().union(*(part.learned for part in self.parts))

    def registered(self) -> list[Any]:
        """Say who this is, of all fragments; the first one's session has the leases."""
        said = []
        for number, part in enumerate(self.parts):
            part.pulled = {}
            said += self._do(number, part.client.registered(0.0, () if number else tuple(self.leases)))
        return said

    def train(self) -> list[Any]:
        """Learn from one sample, or ask for data."""
        for number, lease in self.leases.items():
            if self.reached[number] < lease.end:
                lesson = Lesson(lease.data_pass, lease.chunk, self.reached[number], f"{self.name}, life {self.life}")
                for part in self.parts:
                    part.learned |= {lesson}
                self.reached[number] += 1
                return [one for k, part in enumerate(self.parts) for one in self._do(k, part.client.step())]
        return [on.ChunkAsked(cluster=self.name)]

    def ask(self, number: int = 0, *, ends_round: bool = False) -> list[Any]:
        """Ask for a push of a fragment, where there is something to give and none under way."""
        part = self.parts[number]
        if not part.can_ask():
            return []
        part.payload = part.learned
        progress = tuple(on.ChunkProgress(lease=lease, upto=upto) for lease, upto in sorted(self.reached.items()))
        told = () if number else progress
        return self._do(number, part.client.ask(tokens=len(part.learned), progress=told, ends_round=ends_round))

    def on_command(self, command: Any) -> list[Any]:
        number = command.fragment
        part = self.parts[number]
        match command:
            case do.LeaseChunk():
                self.leases[command.lease.number] = command.lease
                self.reached[command.lease.number] = command.lease.begin
            case do.StartPull():
                part.pulled = {}
            case do.EndRound():
                ended = part.client.is_to_end(command)
                return (self.ask(number) or self._do(number, part.client.keep_round())) if ended else []
        said = self._do(number, part.client.on_command(0.0, command))
        return said + (self.ask(number) if isinstance(command, do.Welcome) and command.version is None else [])

    def content(self, number: int, *, parameters: bool) -> Content:
        """Return what a layer of a push has in it."""
        part = self.parts[number]
        return part.start | part.payload if parameters else part.payload

    def sent_layer(self, number: int, transfer: on.LayerTransfer) -> list[Any]:
        return self._do(number, self.parts[number].client.sent(transfer))

    def got_layer(self, number: int, transfer: on.LayerTransfer, version: int, content: Content) -> list[Any]:
        part = self.parts[number]
        if part.client.pull and part.client.pull.pull == transfer.ticket:
            assert version == part.client.pull.version
            part.pulled[transfer.layer] = content
        return self._do(number, part.client.arrived(transfer))

    def _do(self, number: int, said: list[Any]) -> list[Any]:
        """Do what the client commands; return what is for the master, and layers to send."""
        for one in said:
            if isinstance(one, do.UseVersion):
                self.parts[number].use(one)
                if one.counted and number == 0:
                    self._finish_leases()
        kept = [one for one in said if not isinstance(one, do.SkipPush | do.UseVersion)]
        return [one if isinstance(one, do.SendLayer) else of_fragment(number, one) for one in kept]

    def _finish_leases(self) -> None:
        waiting = {lesson[:2] for lesson in self.parts[0].learned}
        whole = [number for number, lease in self.leases.items() if self.reached[number] == lease.end]
        for number in whole:
            if (self.leases[number].data_pass, self.leases[number].chunk) not in waiting:
                del self.leases[number], self.reached[number]
