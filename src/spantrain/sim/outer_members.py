"""A cluster and a shard of a simulated run: the policies' own client, a body, and how long things take.

A cluster asks for a push when it has taken H steps since the last one, and trains on while it is sent, while it waits
for an update and while a version comes. What came whole it takes in between two steps.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from spantrain.core import outer_commands as do
from spantrain.core import outer_events as on
from spantrain.core.outer_commands import OuterCommand, SkipPush, UseVersion
from spantrain.core.outer_events import OuterEvent, Transfer, Way
from spantrain.errors import ProtocolError
from spantrain.policy.outer.client import ClientPhase, OuterClient, Said
from spantrain.policy.outer.round_steps import RoundSteps
from spantrain.sim.outer_bodies import ClusterBody, ShardBody
from spantrain.sim.outer_case import OuterCase, SimulatedCluster, SimulatedShard

__all__ = ["ClusterMember", "MemberWorld", "ShardMember"]

_UPDATE = (do.Measure, do.Combine, do.Stage, do.Commit)


class MemberWorld(Protocol):
    """What a member can do: wait, tell the master, send a layer."""

    @property
    def now_s(self) -> float:
        """Time."""

    def later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something after a while."""

    def tell(self, member: str, event: OuterEvent) -> None:
        """Send the master an event."""

    def carry(self, way: Way, transfer: Transfer, version: int, content: Any) -> None:
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
        self._client = OuterClient(spec.name, {spec.name: tuple(range(len(case.layers)))})
        self._chance = random.Random(spec.name)
        self._came: deque[tuple[SkipPush | UseVersion, dict[int, Any]]] = deque()
        self._arriving: dict[int, Any] = {}
        self._round = RoundSteps(case.inner_steps)
        self._round_ended = False
        self._steps_kept = self._steps_counted = 0
        self._began = self._stepping = self._waiting = False
        self._exchange_since_s: float | None = None
        self.dead = False
        self.rounds = 0
        self.train_s = self.comm_s = self.blocked_s = 0.0

    @property
    def steps(self) -> int:
        """That were taken."""
        return self._round.steps

    @property
    def idle(self) -> bool:
        """Whether all steps are taken."""
        return not self._stepping

    @property
    def steps_left(self) -> int:
        """That no update has counted."""
        return self.steps - self._steps_counted

    @property
    def done(self) -> bool:
        """Whether all steps are taken, and all that was learned is decided on."""
        quiet = self._client.phase is ClientPhase.FREE and self._client.pull is None and not self._came
        return self.idle and quiet and not self.steps_left

    def registered(self) -> None:
        """Begin a connection."""
        self._say(self._client.registered())

    def heard(self, command: OuterCommand) -> None:
        """Take in what the master commands."""
        if isinstance(command, do.RegisterAgain):
            self._world.connect(self._spec.name)
            return
        if isinstance(command, do.StartPull):
            self._arriving = {}
        self._round_ended = self._round_ended or isinstance(command, do.EndRound)
        self._say(self._client.on_command(command))
        if isinstance(command, do.Welcome) and command.version is None and not self._began:
            self._ask()
            self._go_on()

    def sent(self, transfer: Transfer) -> None:
        """Note that a layer has left."""
        self._say(self._client.sent(transfer))

    def got(self, transfer: Transfer, content: Any) -> None:
        """Take in a layer of a version."""
        if self._client.pull and self._client.pull.pull == transfer.ticket:
            self._arriving[transfer.layer] = content
        self._say(self._client.arrived(transfer))

    def _say(self, said: list[Said]) -> None:
        for one in said:
            if isinstance(one, do.SendLayer):
                content = self._body.layer(one.transfer.layer, one.transfer.wire_format, parameters=one.parameters)
                self._world.carry(Way.PUSH, one.transfer, 0, content)
            elif isinstance(one, SkipPush | UseVersion):
                self._came.append((one, self._arriving if isinstance(one, UseVersion) else {}))
            else:
                self._world.tell(self._spec.name, one)
        self._note_exchange()
        if self._came and not self._stepping:
            self._between_steps()

    def _note_exchange(self) -> None:
        now_s = self._world.now_s
        busy = self._client.phase is ClientPhase.SENDING or self._client.pull is not None
        if busy and self._exchange_since_s is None:
            self._exchange_since_s = now_s
        elif not busy and self._exchange_since_s is not None:
            self.comm_s += now_s - self._exchange_since_s
            self._exchange_since_s = None

    # Steps.

    def _go_on(self) -> None:
        self._began = True
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
        self._round.step()
        self._world.stepped()
        self._between_steps()

    def _between_steps(self) -> None:
        """Take in what came, ask for a push if it is time, and go on."""
        if self.dead:
            return
        copies = self._take_in()
        if self._round_ended:
            self._round_ended = False
            if not self._round.end():
                self._say(self._client.keep_round())
        if self._round.is_over and self._client.phase is ClientPhase.FREE:
            self._ask()
            copies += 1
        if copies and self._case.copy_s:
            self._stepping = True
            self.blocked_s += copies * self._case.copy_s
            self._world.later(copies * self._case.copy_s, self._resume)
        else:
            self._resume()

    def _resume(self) -> None:
        if self.dead:
            return
        self._stepping = False
        if self._came:
            self._between_steps()
        else:
            self._go_on()

    def _take_in(self) -> int:
        taken = 0
        while self._came:
            command, layers = self._came.popleft()
            if isinstance(command, SkipPush):
                self._body.skipped()
                continue
            self._body.pulled(layers, counted=command.counted, left_out=command.left_out)
            if command.counted:
                self._count()
            taken += 1
        return taken

    def _count(self) -> None:
        self.rounds += 1
        self._steps_counted = self._steps_kept

    def _ask(self) -> None:
        assert self._client.phase is ClientPhase.FREE
        self._body.keep()
        self._steps_kept = self.steps
        ends_round = self._round.begin_push()
        self._say(self._client.ask(tokens=self.steps_left * self._case.tokens_per_step, ends_round=ends_round))

    def _push_rest(self) -> None:
        """Ask for a last push; again after a while, for as long as something is left."""
        if self.steps_left and self._client.phase is ClientPhase.FREE and not self._came:
            self._ask()
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

    def __init__(self, world: MemberWorld, spec: SimulatedShard, case: OuterCase, body: ShardBody) -> None:
        self._world, self._spec, self._case, self._body = world, spec, case, body
        self._free_s = 0.0
        self._connection = 0
        self.dead = False

    @property
    def versions(self) -> tuple[int, ...]:
        """That it can go on from."""
        return self._body.restorable

    def registered(self) -> None:
        """Begin a connection; commands of the last one are not done any more."""
        self._connection += 1
        self._world.tell(self._spec.name, self._body.registered())

    def heard(self, command: OuterCommand) -> None:
        """Do what the master commands, when it is its turn."""
        if isinstance(command, do.RegisterAgain):
            self._world.connect(self._spec.name)
        elif isinstance(command, do.Move):
            self._give(command)
        else:
            takes_s = self._spec.command_s if isinstance(command, _UPDATE) else 0.0
            self._free_s = max(self._free_s, self._world.now_s) + takes_s
            self._world.later(self._free_s - self._world.now_s, self._do, command, self._connection)

    def _do(self, command: OuterCommand, connection: int) -> None:
        if self.dead or connection != self._connection:
            return
        answer = self._body.on_command(command)
        if isinstance(answer, on.ShardRegistered):
            self._world.connect(self._spec.name)
            return
        if isinstance(command, do.Commit) and command.version % self._case.snapshot_every == 0:
            self._body.snapshot()
        if answer is not None:
            self._world.tell(self._spec.name, answer)

    def _give(self, command: do.Move) -> None:
        try:
            content = self._body.give(command.version, command.transfer.layer)
        except ProtocolError as error:
            lost = on.TransferLost(way=Way.PULL, transfer=command.transfer, reason=str(error))
            self._world.tell(self._spec.name, lost)
        else:
            self._world.carry(Way.PULL, command.transfer, command.version, content)

    def got(self, transfer: Transfer, content: Any) -> None:
        """Take in a layer of a push."""
        try:
            self._body.take(transfer.ticket, transfer.layer, content, transfer.wire_format)
        except ProtocolError as error:
            event: OuterEvent = on.TransferLost(way=Way.PUSH, transfer=transfer, reason=str(error))
        else:
            event = on.Moved(way=Way.PUSH, transfer=transfer)
        self._world.tell(self._spec.name, event)
