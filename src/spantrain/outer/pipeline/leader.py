"""The stage of a pipeline that speaks for its cluster: what `outer.client.session` does, for several stages at once.

Di-PS, 3.2 and 4.2, by the decisions of `outer.policy.client` and `outer.policy.pushes`. The leader hears how far the
others are at the boundaries of steps, and learns there that they have sent or got a layer; so a push is over, and a
version whole, a step or two later than the last byte.
"""

import time
from collections.abc import Callable, Mapping

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand, UseVersion
from spantrain.core.outer.events import LayerTransfer, OuterEvent, Ticket
from spantrain.core.outer.layers import Layer
from spantrain.core.outer.stages import StageMeeting, StageOrder, StageReport
from spantrain.errors import ProtocolError
from spantrain.outer.client.replica import ClusterCopy, TakenPush
from spantrain.outer.client.rounds import VersionWatch
from spantrain.outer.client.session import ClientSession, SessionUpdate
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.policy.client import Said
from spantrain.outer.policy.pushes import StageRounds

_PULL_PAUSE_S = 0.25
"""Between a pull that was broken off and the next: a stage that lost its connection takes a while to be back."""


class StageLeader(ClientSession):
    """A cluster's session whose layers are moved by several processes, and its part at the boundaries of steps."""

    def __init__(
        self, cluster: str, layers: tuple[Layer, ...], copy: ClusterCopy, *, own: tuple[int, ...],
        others: Mapping[str, tuple[str, tuple[int, ...]]], inner_steps: int, start: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Begin a round, without a connection.

        Args:
            cluster: its name, and that of this process
            layers: of the whole model
            copy: of this stage's parameters
            own: the layers that it moves
            others: worker's name and layers of the other stages, by device
            inner_steps: between two pushes
            start: joins the master; called when all workers are connected, since it gives them work at once
            clock: in seconds
        """
        super().__init__(cluster, layers, workers={cluster: own, **dict(others.values())}, clock=clock)
        self._copy, self._others = copy, dict(others)
        self._rounds = StageRounds(others, inner_steps=inner_steps)
        self._watch = VersionWatch(self, inner_steps=inner_steps)
        self._start, self._started = start, False
        self._ordered = SessionUpdate()
        self._copied: TakenPush | None = None
        self._took_s = 0.0
        self._pull_due_s: float | None = None
        self._pull: Ticket | None = None
        """The last pull that began."""
        self._update_pull: Ticket | None = None
        """The pull that brought the version of the last update."""

    # From the link.

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        """Take note of a new connection; return the event to register with."""
        with self.changed:
            self._pull_due_s = None
            if welcome.settings.fragments > 1:
                self._warn(
                    "the master has the model in fragments, with which a pipeline takes no part; it trains alone"
                )
                return ()
            if welcome.settings.ahead is not None:
                self._warn("the master would have clusters stand still behind a push (`ahead`); a pipeline trains on")
        return super().joined(welcome)

    def _note(self, command: OuterCommand) -> None:
        super()._note(command)
        if isinstance(command, do.StartPull):
            self._pull = command.pull

    def _use(self, command: UseVersion) -> None:
        super()._use(command)
        self._update_pull = self._pull

    def _tell(self, event: OuterEvent) -> None:
        if isinstance(event, on.PullAsked):
            self._pull_due_s = self._clock() + _PULL_PAUSE_S
        else:
            super()._tell(event)

    # At the boundaries of steps.

    def step(self, tokens: int) -> None:
        """Count a step that all stages have done, or are about to end."""
        self._rounds.pushes.step(tokens)
        self.stepped()
        self._watch.step()
        self.meter.inner_steps += 1
        self.meter.tokens += tokens

    def report(self, *, everything: bool = False, over: bool = False) -> StageReport:
        """Say what all do now; `everything`: push whatever there is; `over`: and then end waiting.

        Raises:
            ProtocolError: a fault of this side has cut it off.
        """
        with self.changed:
            if self.cut_off:
                raise ProtocolError(f"the cluster is cut off from master and shards: {self.cut_off}")
            update = self._ordered = self.take_update()
            if update.version is not None:
                self.meter.version = update.version
                self._watch.came(update.version)
            if update.round_ended and not self._rounds.end_round():
                self.keep_round()
            known = StageOrder(
                skipped=update.skipped,
                pull=None if update.version is None else self._update_pull,
                version=update.version or 0,
                counted=update.counted,
                left_out=update.left_out,
                over=over,
                floor=self._pull,
            )
            order = self._rounds.order(
                known, can_push=self.can_push, wants_first=self.wants_first, everything=everything
            )
            return StageReport(connected=self.registered, order=order)

    def follow(self, meeting: StageMeeting) -> None:
        """Do what was ordered; hear how far the others are."""
        begun_s = time.monotonic()
        taken = self._copy.follow(meeting.order, self._ordered.tensors)
        if taken is not None:
            self._copied, self._took_s = taken, time.monotonic() - begun_s
        self._ordered = SessionUpdate()
        others = {device: meeting.reports[device] for device in self._others}
        if not self._started and all(report.connected for report in others.values()):
            self._started = True
            self._start()
        for device, report in others.items():
            self._hear_of(*self._others[device], report)
        tokens = self._rounds.to_ask(others)
        if tokens is not None and self._copied is not None:
            self.ask(self._copied, tokens=tokens, took_s=self._took_s, ends_round=self._rounds.pushes.ends_round)
            self._copied = None
        self._pull_if_due()

    def _hear_of(self, worker: str, layers: tuple[int, ...], report: StageReport) -> None:
        """Take in how far another stage is."""
        with self.changed:
            said: list[Said] = []
            for layer in layers:
                if report.sent is not None:
                    said += self._client.sent(self._transfer(worker, report.sent, layer))
                if report.whole is not None:
                    said += self._client.arrived(self._transfer(worker, report.whole, layer))
            if said:
                # Of what arrived the worker itself has told the master.
                self._carry_out([one for one in said if not isinstance(one, on.Moved)])
                self._notify()

    def _transfer(self, worker: str, ticket: Ticket, layer: int) -> LayerTransfer:
        return LayerTransfer(ticket=ticket, cluster=self.name, worker=worker, layer=layer, shard="", size_bytes=0)

    def _pull_if_due(self) -> None:
        """Ask for a pull again that was broken off a while ago."""
        with self.changed:
            if self._pull_due_s is not None and self._clock() >= self._pull_due_s:
                self._pull_due_s = None
                super()._tell(on.PullAsked(cluster=self.name))

    @property
    def has_given_all(self) -> bool:
        """Whether nothing is under way, and nothing left to give."""
        return self.is_idle and not self._rounds.some_left
