"""What the demonstration of the outer optimizer has heard of its processes: rows for a table, curves, final figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from spantrain.errors import WorkerError


@dataclass(frozen=True, kw_only=True)
class ClusterRow:
    """One cluster, now."""

    name: str
    speed: float
    """Of the fastest cluster's."""
    step_s: float
    """Emulated seconds of an inner step."""
    state: str = "starts"
    inner_steps: int = 0
    tokens: int = 0
    version: int = 0
    """That it trains on from."""
    outer_rounds: int = 0
    mean_staleness: float = 0.0
    comm_s: float = 0.0
    train_s: float = 0.0
    blocked_s: float = 0.0
    """In which training waited for the outer optimizer."""
    loop_s: float = 0.0
    """Since its first inner step began, all told."""
    loss: float | None = None
    """Of the last inner step."""
    heldout_loss: float | None = None
    up_bytes_per_s: float | None = None
    """On its link in the last second; None where links are not emulated."""
    down_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """A held-out loss, and when."""

    cluster: str
    version: int
    time_s: float
    """Since training began."""
    tokens: int
    """Of all clusters together."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class DemoClusterFigures:
    """What came of one cluster."""

    tokens: int
    inner_steps: int
    outer_rounds: int
    mean_staleness: float
    comm_s: float
    """In which it pushed or pulled, while it trained on."""
    train_s: float
    """Outside of the outer optimizer's calls."""
    blocked_s: float
    """In them, from the first inner step to the last."""
    speed: float
    throughput_vs_ideal: float
    """Its inner steps over those that it would have done alone in that time."""
    real_compute_ratio: float
    """Real computation over emulated time: it should be small."""


@dataclass(frozen=True, kw_only=True)
class OuterDemoSummary:
    """What came out; written as summary.json."""

    clusters: Mapping[str, DemoClusterFigures]
    loss_first: float
    """Held out, before training."""
    loss_last: float
    """Held out, of the newest version that a cluster had at the end."""
    versions: int
    rejected_updates: int
    """Pushes that the guard left out."""
    throughput_vs_ideal: float
    """All clusters' tokens over those that each would have done alone."""
    losses: Sequence[LossPoint]
    picture: str
    emulated: str


@dataclass
class DemoRecord:
    """Hears what processes print, one message after the other."""

    rows: dict[str, ClusterRow]
    points: list[LossPoint] = field(default_factory=list)
    versions: int = 0
    rejected: int = 0
    began_s: float | None = None
    """When the first inner step ended."""
    _ratios: dict[str, float] = field(default_factory=dict)
    _first: float | None = None

    @property
    def tokens(self) -> int:
        """Of all clusters."""
        return sum(row.tokens for row in self.rows.values())

    def hear(self, now_s: float, name: str, message: Mapping[str, float]) -> None:
        """Take in a message of a cluster, or of the master."""
        if name not in self.rows:
            self.versions = int(message.get("version", self.versions))
            self.rejected = int(message.get("left_out", self.rejected))
            return
        known: dict[str, Any] = {key: value for key, value in message.items() if key in _MEASURED}
        self.rows[name] = replace(self.rows[name], state="trains", **known)
        if self.began_s is None and self.rows[name].inner_steps:
            self.began_s = now_s
        if "real_compute_ratio" in message:
            self._ratios[name] = message["real_compute_ratio"]
            self.rows[name] = replace(self.rows[name], state="done")
        if "heldout_loss" in message:
            self._point(now_s, name, message["heldout_loss"])

    def _point(self, now_s: float, name: str, loss: float) -> None:
        if self._first is None:
            self._first = loss
        time_s = now_s - self.began_s if self.began_s is not None else 0.0
        version = self.rows[name].version
        self.points.append(LossPoint(cluster=name, version=version, time_s=time_s, tokens=self.tokens, loss=loss))

    def links(self, rates: Mapping[str, tuple[float, float]]) -> None:
        """Note the rates of links, by cluster: up and down."""
        for name, (up, down) in rates.items():
            self.rows[name] = replace(self.rows[name], up_bytes_per_s=up, down_bytes_per_s=down)

    def lost(self, name: str) -> None:
        """Note that a cluster's process has ended."""
        self.rows[name] = replace(self.rows[name], state="gone")

    def summary(self, *, picture: str, emulated: str) -> OuterDemoSummary:
        """Return the figures.

        Raises:
            WorkerError: no cluster has trained.
        """
        if self._first is None or not any(row.inner_steps for row in self.rows.values()):
            raise WorkerError("no cluster of the demonstration has trained; see the logs in its folder")
        newest = max(self.points, key=lambda point: (point.version, point.time_s))
        ideal = sum(row.loop_s / row.step_s for row in self.rows.values())
        return OuterDemoSummary(
            clusters={name: self._figures(row) for name, row in self.rows.items()},
            loss_first=self._first,
            loss_last=newest.loss,
            versions=self.versions,
            rejected_updates=self.rejected,
            throughput_vs_ideal=sum(row.inner_steps for row in self.rows.values()) / ideal if ideal else 0.0,
            losses=tuple(self.points),
            picture=picture,
            emulated=emulated,
        )

    def _figures(self, row: ClusterRow) -> DemoClusterFigures:
        same = {one.name for one in fields(DemoClusterFigures)} & {one.name for one in fields(ClusterRow)}
        return DemoClusterFigures(
            **{name: getattr(row, name) for name in same},
            throughput_vs_ideal=row.inner_steps * row.step_s / row.loop_s if row.loop_s else 0.0,
            real_compute_ratio=self._ratios.get(row.name, 0.0),
        )


_MEASURED = frozenset(
    {"inner_steps", "tokens", "version", "outer_rounds", "mean_staleness", "comm_s", "train_s", "blocked_s", "loop_s",
     "loss", "heldout_loss"}
)  # fmt: skip
