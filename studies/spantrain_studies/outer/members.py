"""A cluster and a shard of a simulated run: the policies' own client, a body, and how long things take.

When a cluster pushes is decided by `outer.policy.pushes`, as where it trains; it trains on while a push is sent, while
it waits for an update and while a version comes. What came whole it takes in between two steps.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand, SkipPush, UseVersion
from spantrain.core.outer.events import LayerTransfer, OuterEvent, TransferWay, of_fragment
from spantrain.errors import ProtocolError
from spantrain.outer.policy.client import ClientPhase, OuterClient, Said
from spantrain.outer.policy.pushes import PushRounds
from spantrain_studies.outer.bodies import ClusterBody, ShardBody
from spantrain_studies.outer.case import OuterCase, SimulatedCluster, SimulatedShard


class ClusterRounds:
    """The policies' own client and a body, and what came between two steps. Answers with what is to be said."""

    def __init__(self, cluster: str, case: OuterCase, body: ClusterBody, number: int) -> None:
        """`number`: of the fragment."""
        self.client = OuterClient(cluster, {cluster: tuple(range(len(case.fragments[number].layers)))})
        self._body, self._tokens_per_step = body, case.tokens_per_step
        self.pushes = PushRounds(case.inner_steps, fragment=number, fragments=len(case.fragments))
        self._round_ended = False
        self._ahead = case.settings.ahead
        self._came: deque[tuple[SkipPush | UseVersion, dict[int, Any]]] = deque()
        self._arriving: dict[int, Any] = {}
        self.begun = False
        """Whether it has a version, or brings the first."""
        self.rounds = 0

    @property
    def has_news(self) -> bool:
        """Whether something is to be taken in between two steps."""
        return bool(self._came)

    @property
    def done(self) -> bool:
        """Whether all that was learned is decided on."""
        return self._is_free and self.client.pull is None and not self._came and not self.pushes.has_some

    @property
    def _is_free(self) -> bool:
        """Whether no push is under way."""
        return self.client.phase is ClientPhase.FREE

    @property
    def exchanges(self) -> bool:
        """Whether layers are on their way, or will be at once."""
        return self.client.phase is ClientPhase.SENDING or self.client.pull is not None

    @property
    def may_go_on(self) -> bool:
        """Whether to take another step; not where so many were taken behind a push that it is to be waited for."""
        return not self.client.is_registered or self._is_free or not self.pushes.is_ahead(self._ahead)

    def is_due(self, now_s: float, *, everything: bool = False) -> bool:
        """Whether to push now, a round or whatever there is."""
        return not self._came and self.client.may_ask(now_s) and self.pushes.is_due(everything=everything)

    def heard(self, now_s: float, command: OuterCommand) -> list[Said]:
        """Take in what the master commands."""
        if isinstance(command, do.StartPull):
            self._arriving = {}
        self._round_ended = self._round_ended or self.client.is_to_end(command)
        return self.client.on_command(now_s, command)

    def got(self, transfer: LayerTransfer, content: Any) -> list[Said]:
        """Take in a layer of a version."""
        if self.client.pull and self.client.pull.pull == transfer.ticket:
            self._arriving[transfer.layer] = content
        return self.client.arrived(transfer)

    def came(self, one: SkipPush | UseVersion) -> None:
        """Keep for the time between two steps what its client says."""
        self._came.append((one, self._arriving if isinstance(one, UseVersion) else {}))

    def content(self, command: do.SendLayer) -> Any:
        """Return a layer that is to be sent."""
        transfer = command.transfer
        return self._body.layer(transfer.layer, transfer.wire_format, parameters=command.parameters)

    # Steps.

    def step(self) -> list[Said]:
        """Count one."""
        self.pushes.step(self._tokens_per_step)
        return self.client.step()

    def take_in(self) -> int:
        """Take in what came; return how many versions that were."""
        taken = 0
        while self._came:
            command, layers = self._came.popleft()
            if isinstance(command, SkipPush):
                self._body.skipped()
                self.pushes.note(skipped=True)
                continue
            self._body.pulled(layers, counted=command.counted, left_out=command.left_out)
            if command.counted:
                self.rounds += 1
                self.pushes.note(counted=True)
            self.begun = True
            taken += 1
        return taken

    def end_round(self) -> list[Said]:
        """End a round that another cluster has ended for all; say so if there is too little for a push."""
        ended, self._round_ended = self._round_ended, False
        return self.client.keep_round() if ended and not self.pushes.end() else []

    def ask(self) -> list[Said]:
        """Ask for a push."""
        assert self._is_free
        self.begun = True
        self._body.keep()
        return self.client.ask(tokens=self.pushes.begin_push(), ends_round=self.pushes.ends_round)


_UPDATE = (do.Measure, do.Combine, do.StageVersion, do.Commit)


class MemberWorld(Protocol):
    """What a member can do: wait, tell the master, send a layer."""

    @property
    def now_s(self) -> float:
        """Time."""

    def later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something after a while."""

    def tell(self, member: str, event: OuterEvent) -> None:
        """Send the master an event."""

    def carry(self, way: TransferWay, transfer: LayerTransfer, version: int, content: Any) -> None:
        """Send a layer."""

    def connect(self, member: str) -> None:
        """Begin a new connection to the master."""

    def may_step(self) -> bool:
        """Whether another step is to be taken, by whoever asks."""

    def stepped(self) -> None:
        """Note the end of a step."""

    def settled(self) -> None:
        """Note that a cluster takes no more steps, and may have nothing left to push."""


class ClusterMember:
    """One life of a cluster."""

    def __init__(self, world: MemberWorld, spec: SimulatedCluster, case: OuterCase, body: ClusterBody) -> None:
        self._world, self._spec, self._case, self._body = world, spec, case, body
        count = len(case.fragments)
        bodies = [body] if count == 1 else [body.part(number, count) for number in range(count)]
        self._parts = [ClusterRounds(spec.name, case, one, number) for number, one in enumerate(bodies)]
        self._chance = random.Random(spec.name)
        self._began = self._stepping = self._standing = self._waiting = False
        self._exchange_since_s: float | None = None
        self.dead = False
        self.train_s = self.comm_s = self.blocked_s = 0.0

    @property
    def steps(self) -> int:
        """That were taken."""
        return self._parts[0].pushes.steps

    @property
    def rounds(self) -> int:
        """That ended in a new start; of a model in fragments those of each."""
        return sum(part.rounds for part in self._parts)

    @property
    def idle(self) -> bool:
        """Whether all steps are taken."""
        return not (self._stepping or self._standing)

    @property
    def done(self) -> bool:
        """Whether all steps are taken, and all that was learned is decided on."""
        return self.idle and all(part.done for part in self._parts)

    def registered(self) -> None:
        """Begin a connection."""
        for number, part in enumerate(self._parts):
            self._say(number, part.client.registered(self._world.now_s))

    def cut_off(self) -> None:
        """Lose the connection to the master: nothing is waited for."""
        for part in self._parts:
            part.client.disconnected()
        if self._standing:
            self._between_steps()

    def heard(self, command: OuterCommand) -> None:
        """Take in what the master commands."""
        number = command.fragment
        if isinstance(command, do.RegisterAgain):
            self._world.connect(self._spec.name)
            return
        part = self._parts[number]
        self._say(number, part.heard(self._world.now_s, command))
        if isinstance(command, do.Welcome) and command.version is None and not part.begun:
            self._say(number, part.ask())
            if not self._began:
                self._go_on()

    def sent(self, number: int, transfer: LayerTransfer) -> None:
        """Note that a layer has left."""
        self._say(number, self._parts[number].client.sent(transfer))

    def got(self, number: int, transfer: LayerTransfer, content: Any) -> None:
        """Take in a layer of a version."""
        self._say(number, self._parts[number].got(transfer, content))

    def _say(self, number: int, said: list[Said]) -> None:
        part = self._parts[number]
        for one in said:
            if isinstance(one, do.SendLayer):
                self._world.carry(TransferWay.PUSH, one.transfer, 0, part.content(one))
            elif isinstance(one, SkipPush | UseVersion):
                part.came(one)
            else:
                self._world.tell(self._spec.name, of_fragment(number, one))
        self._note_exchange()
        if (part.has_news or self._standing) and not self._stepping:
            self._between_steps()

    def _note_exchange(self) -> None:
        now_s = self._world.now_s
        busy = any(part.exchanges for part in self._parts)
        if busy and self._exchange_since_s is None:
            self._exchange_since_s = now_s
        elif not busy and self._exchange_since_s is not None:
            self.comm_s += now_s - self._exchange_since_s
            self._exchange_since_s = None

    # Steps.

    def _go_on(self) -> None:
        if not all(part.begun for part in self._parts):
            return
        self._began = True
        self._standing = not all(part.may_go_on for part in self._parts)
        if self._standing:
            return
        self._stepping = self._world.may_step()
        if self._stepping:
            seconds = self._spec.step_s * (1 + self._spec.gap * self._chance.random())
            self.train_s += seconds
            self._world.later(seconds, self._end_step)
        else:
            self._push_rest()

    def _end_step(self) -> None:
        if self.dead:
            return
        self._body.step()
        for number, part in enumerate(self._parts):
            self._say(number, part.step())
        self._world.stepped()
        self._between_steps()

    def _between_steps(self) -> None:
        """Take in what came, ask for pushes if it is time, and go on."""
        if self.dead:
            return
        self._stepping = True
        copies = 0.0
        for number, part in enumerate(self._parts):
            copies += part.take_in() * self._size(number)
            self._say(number, part.end_round())
            if part.is_due(self._world.now_s):
                self._say(number, part.ask())
                copies += self._size(number)
        if copies and self._case.copy_s:
            self.blocked_s += copies * self._case.copy_s
            self._world.later(copies * self._case.copy_s, self._resume)
        else:
            self._resume()

    def _size(self, number: int) -> float:
        """Return what part of the model a fragment is."""
        return self._case.fragments[number].size_bytes / self._case.model_bytes

    def _resume(self) -> None:
        if self.dead:
            return
        self._stepping = False
        if any(part.has_news for part in self._parts):
            self._between_steps()
        else:
            self._go_on()

    def _push_rest(self) -> None:
        """Ask for last pushes; again after a while, for as long as something is left."""
        for number, part in enumerate(self._parts):
            if part.is_due(self._world.now_s, everything=True):
                self._say(number, part.ask())
        if self.done:
            self._world.settled()
        elif not self._waiting:
            self._waiting = True
            self._world.later(self._case.settings.lost_after_s / 4, self._try_again)

    def _try_again(self) -> None:
        self._waiting = False
        if not self.dead and self.idle:
            self._push_rest()


class ShardMember:
    """One life of a shard: commands one after the other, layers beside them."""

    def __init__(
        self, world: MemberWorld, spec: SimulatedShard, case: OuterCase, bodies: Sequence[ShardBody]
    ) -> None:  # fmt: skip
        """`bodies`: for each fragment."""
        self._world, self._spec, self._case, self._bodies = world, spec, case, tuple(bodies)
        self._free_s = 0.0
        self._connection = 0
        self.dead = False

    def beat(self) -> None:
        """Give a sign of life, with the versions that it can go on from."""
        for number, body in enumerate(self._bodies):
            event = on.ShardBeat(shard=self._spec.name, versions=body.restorable)
            self._world.tell(self._spec.name, of_fragment(number, event))

    def registered(self) -> None:
        """Begin a connection; commands of the last one are not done any more."""
        self._connection += 1
        for number, body in enumerate(self._bodies):
            self._world.tell(self._spec.name, of_fragment(number, body.registered()))

    def heard(self, command: OuterCommand) -> None:
        """Do what the master commands, when it is its turn."""
        number = command.fragment
        if isinstance(command, do.RegisterAgain):
            self._world.connect(self._spec.name)
        elif isinstance(command, do.Move):
            if command.way is TransferWay.PULL:
                self._give(number, command)
        else:
            takes_s = self._spec.command_s / len(self._bodies) if isinstance(command, _UPDATE) else 0.0
            self._free_s = max(self._free_s, self._world.now_s) + takes_s
            self._world.later(self._free_s - self._world.now_s, self._do, number, command, self._connection)

    def _do(self, number: int, command: OuterCommand, connection: int) -> None:
        if self.dead or connection != self._connection:
            return
        body = self._bodies[number]
        answer = body.on_command(command)
        if isinstance(answer, on.ShardRegistered):
            self._world.connect(self._spec.name)
            return
        if isinstance(command, do.Commit) and command.version % self._case.snapshot_every == 0:
            body.snapshot()
        if answer is not None:
            self._world.tell(self._spec.name, of_fragment(number, answer))

    def _give(self, number: int, command: do.Move) -> None:
        try:
            content = self._bodies[number].give(command.version, command.transfer.layer)
        except ProtocolError as error:
            lost = on.TransferLost(way=TransferWay.PULL, transfer=command.transfer, reason=str(error))
            self._world.tell(self._spec.name, of_fragment(number, lost))
        else:
            self._world.carry(TransferWay.PULL, command.transfer, command.version, content)

    def got(self, number: int, transfer: LayerTransfer, content: Any) -> None:
        """Take in a layer of a push."""
        try:
            self._bodies[number].take(transfer.ticket, transfer.layer, content, transfer.wire_format)
        except ProtocolError as error:
            event: OuterEvent = on.TransferLost(way=TransferWay.PUSH, transfer=transfer, reason=str(error))
        else:
            event = on.Moved(way=TransferWay.PUSH, transfer=transfer)
        self._world.tell(self._spec.name, of_fragment(number, event))
