"""The rounds of one fragment of a simulated cluster's model; a model that is not in fragments is one."""

from collections import deque
from typing import Any

from spantrain.core.outer import commands as do
from spantrain.core.outer.commands import OuterCommand, SkipPush, UseVersion
from spantrain.core.outer.events import LayerTransfer
from spantrain.outer.policy.client import ClientPhase, OuterClient, Said
from spantrain.outer.policy.pushes import RoundSteps
from spantrain_studies.outer.bodies import ClusterBody
from spantrain_studies.outer.case import OuterCase


class ClusterRounds:
    """The policies' own client and a body, and what came between two steps. Answers with what is to be said."""

    def __init__(self, cluster: str, case: OuterCase, body: ClusterBody, number: int) -> None:
        """`number`: of the fragment."""
        self._client = OuterClient(cluster, {cluster: tuple(range(len(case.fragments[number].layers)))})
        self._body, self._tokens_per_step = body, case.tokens_per_step
        self._round = RoundSteps(case.inner_steps, fragment=number, fragments=len(case.fragments))
        self._round_ended = self._connected = False
        self._ahead = case.settings.ahead
        self._came: deque[tuple[SkipPush | UseVersion, dict[int, Any]]] = deque()
        self._arriving: dict[int, Any] = {}
        self._steps_kept = self._steps_counted = 0
        self.begun = False
        """Whether it has a version, or brings the first."""
        self.refused = False
        """Whether the last push came to nothing, and no version has come since: asking at once is of no use."""
        self.rounds = 0

    @property
    def steps(self) -> int:
        """That were taken."""
        return self._round.steps

    @property
    def steps_left(self) -> int:
        """That no update has counted."""
        return self.steps - self._steps_counted

    @property
    def has_news(self) -> bool:
        """Whether something is to be taken in between two steps."""
        return bool(self._came)

    @property
    def done(self) -> bool:
        """Whether all that was learned is decided on."""
        return self.is_free and self._client.pull is None and not self._came and not self.steps_left

    @property
    def is_free(self) -> bool:
        """Whether no push is under way."""
        return self._client.phase is ClientPhase.FREE

    @property
    def exchanges(self) -> bool:
        """Whether layers are on their way, or will be at once."""
        return self._client.phase is ClientPhase.SENDING or self._client.pull is not None

    @property
    def may_go_on(self) -> bool:
        """Whether to take another step; not where so many were taken behind a push that it is to be waited for."""
        return not self._connected or self.is_free or not self._round.is_ahead(self._ahead)

    @property
    def is_due(self) -> bool:
        """Whether to push now."""
        return self._round.is_over and self.is_free

    def registered(self) -> list[Said]:
        """Begin a connection."""
        return self._client.registered()

    def cut_off(self) -> None:
        """Lose the connection."""
        self._connected = False

    def heard(self, command: OuterCommand) -> list[Said]:
        """Take in what the master commands."""
        self._connected = self._connected or isinstance(command, do.Welcome)
        if isinstance(command, do.StartPull):
            self._arriving = {}
        self._round_ended = self._round_ended or self._client.is_to_end(command)
        return self._client.on_command(command)

    def sent(self, transfer: LayerTransfer) -> list[Said]:
        """Note that a layer has left."""
        return self._client.sent(transfer)

    def got(self, transfer: LayerTransfer, content: Any) -> list[Said]:
        """Take in a layer of a version."""
        if self._client.pull and self._client.pull.pull == transfer.ticket:
            self._arriving[transfer.layer] = content
        return self._client.arrived(transfer)

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
        self._round.step()
        return self._client.step()

    def take_in(self) -> int:
        """Take in what came; return how many versions that were."""
        taken = 0
        while self._came:
            command, layers = self._came.popleft()
            if isinstance(command, SkipPush):
                self._body.skipped()
                self.refused = True
                continue
            self._body.pulled(layers, counted=command.counted, left_out=command.left_out)
            if command.counted:
                self.rounds += 1
                self._steps_counted = self._steps_kept
            self.begun, self.refused = True, False
            taken += 1
        return taken

    def end_round(self) -> list[Said]:
        """End a round that another cluster has ended for all; say so if there is too little for a push."""
        ended, self._round_ended = self._round_ended, False
        return self._client.keep_round() if ended and not self._round.end() else []

    def ask(self) -> list[Said]:
        """Ask for a push."""
        assert self.is_free
        self.begun = True
        self._body.keep()
        self._steps_kept = self.steps
        ends_round = self._round.begin_push()
        return self._client.ask(tokens=self.steps_left * self._tokens_per_step, ends_round=ends_round)
