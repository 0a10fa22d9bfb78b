"""What a training loop calls after each of its steps: the outer optimizer of a cluster.

Di-PS, 2.1 and 3.2, and DiLoCo before it: a cluster trains by itself for so many inner steps, gives what it learned to
the parameter servers, and goes on from what all clusters together have made of it. Kept: that. Decided here: layers
travel beside training; a version is taken between two steps, when all of it is there; a fault of whatever kind only
means that a round comes to nothing, and what was learned goes into the next.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from spantrain.core.outer.layers import group_layers, named_layers
from spantrain.core.outer.stages import INNER_STEPS, OuterCluster
from spantrain.core.records import NotNegative, Positive, bound_problems
from spantrain.errors import UsageError
from spantrain.outer.client.data import LeasedBatches
from spantrain.outer.client.metrics import OuterMetrics
from spantrain.outer.client.parameters import ModelParameters
from spantrain.outer.client.ranks import Ranks, ranks_of
from spantrain.outer.client.rounds import ClientRounds, FragmentRounds
from spantrain.outer.client.sessions import Connector, FragmentSessions, NetworkConnector

Parameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """What few need to change."""

    wait_for_start_s: NotNegative = 30.0
    """How long to wait, before the first step, for the newest version or until this cluster brings the first."""
    wait_for_round_s: Positive = 600.0
    """Where the master bounds how far to train on behind a push (`ahead` of its settings): how long to stand still
    before training on in any case."""
    wait_for_data_s: NotNegative = 2.0
    """With no chunk of data left: how long the master must have been away, before training on samples that do not
    count."""
    encrypted: bool = True
    """Whether layers are, on their way; must be what the master's configuration says."""
    layers: Mapping[str, Sequence[str]] | None = None
    """Names of parameters by the name of the layer that is sent whole; by default blocks, by their names."""
    connector: Connector | None = None
    """Another way to a master than by the network."""

    def __post_init__(self) -> None:
        if problems := bound_problems(self):
            raise UsageError("; ".join(problems))


class OuterOptimizer(AbstractContextManager["OuterOptimizer"]):
    """Takes part in the training of several clusters; every process of this cluster makes one and calls the same.

    It is used as::

        with OuterOptimizer(model.named_parameters(), master="10.0.0.1:7070", token=token, cluster="a") as outer:
            for batch in batches:
                ...
                inner.step()
                outer.step(tokens=batch.numel())
            outer.finish()

    Parameters are changed in place, in `step`. Where torch.distributed has been started, its first process talks to the
    master, and all have the same parameters (DistributedDataParallel) or their parts of them (fully_shard). Buffers, as
    running means of batch normalization, stay each cluster's own, and so does the inner optimizer's state.
    """

    def __init__(
        self, parameters: Parameters, *, master: str, token: str, cluster: str, inner_steps: int = INNER_STEPS,
        options: OuterOptions | None = None, group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """Join, and wait for the newest version; with no master in reach, say so and train until there is one.

        Args:
            parameters: those that are trained, by the names that they have in every cluster: `named_parameters()`
            master: HOST:PORT
            token: what the master printed
            cluster: this cluster's name; no other may have it
            inner_steps: steps between two pushes
            options: what few need to change
            group: the cluster's processes, where they are not all that torch.distributed knows of

        Raises:
            UsageError: parameters, names, numbers or the token make no sense, or the master refuses them.
        """
        if inner_steps < 1:
            raise UsageError(f"inner_steps must be at least 1, got {inner_steps}")
        self._options = options or OuterOptions()
        with ExitStack() as stack:
            self._ranks: Ranks = ranks_of(group)
            stack.callback(self._ranks.close)
            live = ModelParameters(parameters, self._ranks)
            connector = self._options.connector or NetworkConnector(
                master=master, token=token, encrypted=self._options.encrypted
            )
            specs, names = live.specs(), self._options.layers
            layers = group_layers(specs) if names is None else named_layers(specs, names)
            self._session = FragmentSessions(cluster, layers) if self._ranks.rank == 0 else None
            if self._session:
                stack.callback(self._session.close)
                self._session.connect(*connector.connect(self._session, cluster, layers))
            self._rounds = FragmentRounds(live, layers, self._ranks, self._session, inner_steps=inner_steps)
            self._meter = self._rounds.meter
            if self._session:
                self._session.start()
            with self._meter.blocked():
                if self._options.wait_for_start_s:
                    self._rounds.until(ClientRounds.has_begun, self._options.wait_for_start_s)
                    if refused := self._ranks.gather(self._session.refused if self._session else "")[0]:
                        raise UsageError(f"the master does not let cluster {cluster} in: {refused}")
                    self._rounds.stand_still(self._options.wait_for_round_s)
            self._open: ExitStack = stack.pop_all()
        self._closed = False

    @classmethod
    def from_environment(
        cls, parameters: Parameters, *, inner_steps: int = INNER_STEPS, options: OuterOptions | None = None,
        group: dist.ProcessGroup | None = None, variables: Mapping[str, str] = os.environ,
    ) -> "OuterOptimizer":  # fmt: skip
        """Join as `spantrain outer run` says; what it says of steps and encryption goes before what is given here.

        Raises:
            UsageError: the command was not started so; or as `OuterOptimizer`.
        """
        found = OuterCluster.read(variables, inner_steps=inner_steps)
        return cls(
            parameters,
            master=found.master,
            token=found.token,
            cluster=found.cluster,
            inner_steps=found.inner_steps,
            options=replace(options or OuterOptions(), encrypted=found.encrypted),
            group=group,
        )

    def step(self, *, tokens: int = 1, samples: int | None = None) -> None:
        """Count an inner step that was done; take a new version if one is there, and push when the round has ended.

        `tokens`: trained on in this process; a push weighs what its tokens do. `samples`: of this process, of those
        that `data` handed out; None for all, which is right unless a loader fetches ahead.

        Raises:
            UsageError: it was closed, or a number is negative.
        """
        if self._closed:
            raise UsageError("the outer optimizer was closed: no step after that")
        if tokens < 0 or (samples or 0) < 0:
            raise UsageError(f"tokens and samples must not be negative, got {tokens} and {samples}")
        with self._meter.blocked():
            self._rounds.count(tokens)
            if self._session:
                with self._session.changed:
                    self._session.chunks.train(None if samples is None else samples * self._ranks.size)
            if self._rounds.is_time:
                self._rounds.look()
                self._rounds.stand_still(self._options.wait_for_round_s)

    def data(self, samples: int, *, batch_samples: int, seed: int | None = 0) -> LeasedBatches:
        """Return batches, as lists of indices, of a data set that the master leases in chunks to all clusters.

        They serve as `batch_sampler` of a torch DataLoader, too; if that has workers, which fetch ahead, tell `step`
        how many samples were trained on.

        Args:
            samples: of the whole data set, as in the master's configuration
            batch_samples: of a batch in each process
            seed: of the order within chunks, the same in all clusters; None for the data's own

        Raises:
            UsageError: there are no samples; later, the master leases none, or not so many.
        """
        return LeasedBatches(
            samples, batch_samples, seed=seed, rounds=self._rounds, patience_s=self._options.wait_for_data_s
        )

    def finish(self, timeout_s: float = 60.0) -> bool:
        """Push what is left, and wait for the version with it; return whether it came in time.

        If it did, the parameters are that version's: what all clusters have made together so far, no longer this
        cluster's own. Others that train on make newer ones; whoever joins later gets the newest.
        """
        with self._meter.blocked():
            return self._rounds.until(ClientRounds.has_given_all, timeout_s, everything=True)

    @property
    def metrics(self) -> OuterMetrics:
        """What it did so far."""
        return self._meter.read()

    def close(self) -> None:
        """Leave: what was not pushed is this cluster's own. The others go on."""
        self._closed = True
        self._open.close()

    def __exit__(self, *_: object) -> None:
        self.close()
