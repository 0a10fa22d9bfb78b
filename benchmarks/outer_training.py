"""Training by each method in the simulator's virtual time, with real arithmetic: what `outer_convergence.py` runs."""

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outer_gpt import Copy, GptCluster, GptShard, Progress, Recipe, as_tensors, begun, held_out_loss, layers_of
from spantrain.config.files.text_files import write_atomically
from spantrain.core.outer.layers import ShardLayout
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.numerics import weighted_mean
from spantrain_studies.outer.case import MemberLine, OuterCase, OuterResult, SimulatedCluster, SimulatedShard
from spantrain_studies.outer.methods import simulate_method
from spantrain_studies.outer.plain import MemorySnapshots, nesterov, pseudo_gradient

SPEEDS: Mapping[str, tuple[float, ...]] = {
    **{f"0-{gap} %": tuple(1 + gap / 100 * k / 3 for k in range(4)) for gap in (0, 10, 20, 30, 40, 50)},
    "5.2 times": (1.0, 1.0, 1.0, 5.2),
}
"""Seconds of an inner step of each cluster. Uniform gaps: evenly spread from none to that."""
SHARDS = tuple(f"s{k}" for k in range(4))
"""As many as Di-PS has, 5.1, each with a line as fast as a cluster's."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training from start to end."""

    method: str
    speeds: str = "0-50 %"
    inner_steps: int = 64
    rounds: int = 8
    """That each cluster would do if all were alike."""
    seed: int = 0
    spoil: str = ""
    """What the last cluster sends: `noise`, `loud noise`, `huge` or `nan`; `away`: it is not there."""
    grace: float = 0.75
    """In rounds of the fastest cluster."""
    clip_norm: float | None = None
    push_steps: float = 6.0
    """How long a cluster's line is busy with the model, in steps of the fastest."""
    ahead: float | None = None
    """How much of a round clusters train on behind a push, before they stand still; None: as much as it takes."""
    recipe: Recipe = field(default_factory=Recipe)

    @property
    def name(self) -> str:
        """Short."""
        rule = f"{self.recipe.rule.learning_rate:g}/{self.recipe.rule.momentum:g}"
        parts = (self.kind, self.speeds, f"H {self.inner_steps}", f"seed {self.seed}", rule, self.spoil)
        return " ".join(filter(None, parts))

    @property
    def kind(self) -> str:
        """The method, and how far clusters train on behind a push."""
        return self.method if self.ahead is None else f"{self.method} {self.ahead:g}"

    @property
    def steps(self) -> int:
        """Of all clusters that are there, in the same time."""
        speeds = SPEEDS[self.speeds]
        part = sum(1 / step_s for step_s in self.step_s) / sum(1 / step_s for step_s in speeds)
        return round(self.inner_steps * self.rounds * len(speeds) * part)

    @property
    def step_s(self) -> tuple[float, ...]:
        """Of each cluster that is there."""
        return SPEEDS[self.speeds][: 3 if self.spoil == "away" else 4]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of it."""

    run: Run
    loss: float
    """Held out, at the end; without a server the mean over clusters."""
    losses: tuple[float, ...]
    """Under way: held out, after each round's worth of steps."""
    mean_staleness: float
    """Over the clusters."""
    of_ideal: float
    """Throughput, over that of clusters that each train alone; simulated."""
    versions: int
    rejected_updates: int

    @classmethod
    def of(cls, run: Run, bodies: "OuterBodies | PeerBodies", result: OuterResult) -> "Trained":
        """Return what a run came to."""
        return cls(
            run=run,
            loss=bodies.loss(),
            losses=tuple(bodies.losses),
            mean_staleness=statistics.mean(one.mean_staleness for one in result.clusters.values()),
            of_ideal=result.throughput_vs_ideal,
            versions=result.versions,
            rejected_updates=result.rejected_updates,
        )


def kept_of(run: Run, folder: Path | None) -> Trained | None:
    """Return what was written down of a run, if it was."""
    if folder is None or not (file := _file_of(run, folder)).exists():
        return None
    kept = json.loads(file.read_text())
    return Trained(**{**kept, "run": run, "losses": tuple(kept["losses"])})


def train_or_read(run: Run, folder: Path | None) -> Trained:
    """Train, and write down what came of it; or read that, where it was written down before."""
    found = kept_of(run, folder) or train(run)
    if folder is not None:
        write_atomically(_file_of(run, folder), json.dumps(asdict(found), indent=1) + "\n")
    return found


def _file_of(run: Run, folder: Path) -> Path:
    """Return a file of a name that no other run has."""
    digest = hashlib.sha256(json.dumps(asdict(run), sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{run.name.replace(' ', '_').replace('%', '').replace('/', '-')}_{digest}.json"


def train(run: Run) -> Trained:
    """Train; one thread."""
    torch.set_num_threads(1)
    start = begun(replace(run.recipe, rule=Nesterov()), run.seed)
    bodies = (OuterBodies if run.method == "outer" else PeerBodies)(run, start)
    result = simulate_method(run.method, case_of(run, start), bodies)
    return Trained.of(run, bodies, result)


def case_of(run: Run, start: Mapping[str, Tensor]) -> OuterCase:
    """Return who trains over which lines."""
    layers = layers_of(start)
    size_bytes = sum(layer.size_bytes for layer in layers)
    line = MemberLine(bandwidth_bytes_per_s=size_bytes / run.push_steps, latency_s=0.05)
    settings = OuterSettings(
        grace_s=run.grace * run.inner_steps, clip_norm=run.clip_norm, ahead=run.ahead, lost_after_s=100.0
    )
    return OuterCase(
        clusters=tuple(SimulatedCluster(name=f"c{k}", step_s=step_s, line=line) for k, step_s in enumerate(run.step_s)),
        shards=tuple(SimulatedShard(name=name, line=line, command_s=0.1) for name in SHARDS),
        layers=layers,
        inner_steps=run.inner_steps,
        tokens_per_step=run.recipe.tokens_per_step,
        steps=run.steps,
        settings=settings,
    )


class OuterBodies:
    """Clusters and shards of the outer optimizer."""

    def __init__(self, run: Run, start: Mapping[str, Tensor]) -> None:
        self._run, self._start = run, start
        self._layers = layers_of(start)
        self._progress = Progress(run.recipe, run.steps)
        self._shards: dict[tuple[str, int], GptShard] = {}
        self._steps = 0
        self.losses: list[float] = []

    def cluster(self, name: str) -> "Noted":
        """Return a cluster that was just started."""
        spoil = self._run.spoil if name == "c3" else ""
        copy = Copy(self._start, self._run.recipe, f"{self._run.seed} {name}", self._progress)
        return Noted(GptCluster(copy, self._layers, spoil, self._run.seed), self)

    def shard(self, name: str, layout: ShardLayout, fragment: int) -> GptShard:
        """Return what a shard that was just started has of a fragment."""
        shard = self._shards[name, fragment] = GptShard(name, layout, self._run.recipe, MemorySnapshots())
        return shard

    def stepped(self) -> None:
        """Note a step, and the loss now and then."""
        self._steps += 1
        if self._steps % (4 * self._run.inner_steps) == 0:
            self.losses.append(self.loss())

    def loss(self) -> float:
        """Return the held-out loss of the newest version."""
        served = all(shard.serving for shard in self._shards.values())
        return held_out_loss(as_tensors(self._shards.values()) if served else self._start)


class Noted:
    """A cluster's body that tells of its steps."""

    def __init__(self, body: GptCluster, bodies: OuterBodies) -> None:
        self._body, self._bodies = body, bodies

    def step(self) -> None:
        """Take an inner step."""
        self._body.step()
        self._bodies.stepped()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class PeerBodies:
    """Clusters without a server: `dp`, `diloco`, `async-diloco`."""

    def __init__(self, run: Run, start: Mapping[str, Tensor]) -> None:
        self._run = run
        progress = Progress(run.recipe, run.steps)
        names = [f"c{k}" for k in range(len(run.step_s))]
        self._copies = {name: Copy(start, run.recipe, f"{run.seed} {name}", progress) for name in names}
        still = {name: torch.zeros_like(one) for name, one in start.items()}
        self._outer = {name: dict(start) for name in names}
        self._velocity = {name: dict(still) for name in names}
        self._published = {name: dict(start) for name in names}
        self._steps = 0
        self.losses: list[float] = []

    def step(self, cluster: str) -> None:
        """Take an inner step; under `dp` only find gradients."""
        if self._run.method == "dp":
            self._copies[cluster].gradients()
        else:
            self._copies[cluster].step()
        self._steps += 1
        if self._steps % (4 * self._run.inner_steps) == 0:
            self.losses.append(self.loss())

    @torch.no_grad()
    def publish(self, cluster: str) -> None:
        """Give parameters, or gradients."""
        tensors = self._copies[cluster].parameters
        dp = self._run.method == "dp"
        self._published[cluster] = {name: (one.grad if dp else one).detach().clone() for name, one in tensors.items()}

    @torch.no_grad()
    def merge(self, cluster: str) -> None:
        """Go on from the mean of what was published."""
        part = 1 / len(self._published)
        mean = {
            name: weighted_mean([(part, found[name]) for found in self._published.values()])
            for name in self._outer[cluster]
        }
        copy = self._copies[cluster]
        if self._run.method == "dp":
            for name, one in copy.parameters.items():
                one.grad = mean[name]
            copy.update()
            return
        outer, velocity = self._outer[cluster], self._velocity[cluster]
        for name, gradient in pseudo_gradient(outer, mean).items():
            outer[name], velocity[name] = nesterov(outer[name], gradient, velocity[name], self._run.recipe.rule)
            copy.parameters[name].copy_(outer[name])

    def loss(self) -> float:
        """Return the held-out loss, the mean over clusters."""
        if self._run.method == "dp":
            return held_out_loss(self._copies["c0"].parameters)
        apart = self._run.method == "async-diloco"
        return statistics.mean(held_out_loss(self._outer[name]) for name in (self._outer if apart else ("c0",)))
