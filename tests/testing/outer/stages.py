"""A pipeline's stages as one cluster of the outer optimizer, without a pipeline: real sessions, a made-up network."""

import time
from typing import Any

import torch
from torch import Tensor

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.layers import group_layers
from spantrain.core.outer.stages import StageMeeting
from spantrain.outer.client.parameters import spec_of
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.pipeline import StageLeader, StageWorker
from testing.outer.clients import MadeUpConnector, MadeUpServer
from testing.patience import PATIENCE_S

BLOCKS = 3
"""Of the model: a layer each."""


class StagesServer(MadeUpServer):
    """Knows workers as well: they are connected, but do not register."""

    def _join(self, cluster: str, session: Any) -> None:
        if "/" not in cluster:
            super()._join(cluster, session)
            return
        self.clients[cluster] = session
        welcome = MasterWelcome(layout=None, rule=self.rule, settings=self.settings, peers=())
        assert session.joined(welcome) == ()

    def _pass(self, command: Any) -> None:
        super()._pass(command)
        if isinstance(command, do.Move) and command.transfer.worker not in self.clients:
            self._lose(command.way, command.transfer, "not connected")

    def _lose(self, way: on.TransferWay, transfer: on.LayerTransfer, reason: str) -> None:
        self.post(lambda: self._tell(on.TransferLost(way=way, transfer=transfer, reason=reason)))

    def cut(self, cluster: str) -> None:
        super().cut(cluster)
        for way, transfer in self.master.lines.moving if self.master else ():
            if transfer.worker == cluster:
                self._lose(way, transfer, "cut off")


class Fleet:
    """Stages that hold equal numbers and add the same to them: whatever mixes versions or rounds makes them unlike."""

    def __init__(self, server: StagesServer, cluster: str = "a", *, stages: int = 3, inner_steps: int = 2) -> None:
        self.server, self.cluster = server, cluster
        self.held: list[dict[str, Tensor]] = [{} for _ in range(stages)]
        for block in range(BLOCKS):
            self.held[block * stages // BLOCKS] |= {f"h.{block}.w": torch.zeros(4), f"h.{block}.b": torch.zeros(2)}
        layers = group_layers(spec_of(name, one) for held in self.held for name, one in held.items())
        own = {
            k: tuple(i for i, layer in enumerate(layers) if layer.parameters[0].name in self.held[k])
            for k in range(stages)
        }
        names = {k: f"{cluster}/w{k}" if k else cluster for k in range(stages)}
        connector = MadeUpConnector(server)
        # Pauses pass a thousand times as fast.
        self.leader = StageLeader(
            cluster, layers, ClusterCopy(self.held[0]), own=own[0],
            others={f"d{k}": (names[k], own[k]) for k in range(1, stages)}, inner_steps=inner_steps,
            clock=lambda: 1000 * time.monotonic(),
        )  # fmt: skip
        self.leader.connect(*connector.connect(self.leader, cluster, layers))
        self.workers = {
            f"d{k}": StageWorker(names[k], layers, own[k], ClusterCopy(self.held[k])) for k in range(1, stages)
        }
        for worker in self.workers.values():
            own_connector = MadeUpConnector(server)
            worker.connect(*own_connector.connect(worker, worker.name, layers))
            own_connector.start()
        self.meetings: list[StageMeeting] = []

    @property
    def values(self) -> list[float]:
        """The number that each stage holds, everywhere in it."""
        found = []
        for held in self.held:
            (value,) = torch.cat(list(held.values())).unique().tolist()
            found.append(value)
        return found

    def step(self, delta: float, tokens: int = 8) -> None:
        """Train all stages."""
        for held in self.held:
            for one in held.values():
                one.add_(delta)
        self.leader.step(tokens)
        self.meet()

    def meet(self, **leader: Any) -> StageMeeting:
        """All come to a boundary; each hears it as it was sent."""
        reports = {"d0": self.leader.report(**leader), **{name: one.report() for name, one in self.workers.items()}}
        meeting = from_json(StageMeeting, to_json(StageMeeting(reports=reports)), "meeting")
        self.meetings.append(meeting)
        for worker in self.workers.values():
            worker.follow(meeting)
        self.leader.follow(meeting)
        assert len(set(self.values)) == 1, f"stages hold different versions: {self.values}"
        return meeting

    def until(self, over: str, *, everything: bool = False) -> None:
        """Meet until the leader says that something holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline_s, f"never {over}; the last meeting: {self.meetings[-1]}"
            heard = self.leader.heard
            if self.meet(everything=everything, over=getattr(self.leader, over)).order.over:
                return
            self.leader.wait(heard, 0.01)

    @property
    def shared(self) -> list[Tensor]:
        """The shards' parameters."""
        return list(self.server.parameters.values())

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.leader.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
