"""What a comparison found: figures of each method, bounds, the setting; the JSON that `spantrain compare` writes.

Also how a cluster is cut down to what this machine can emulate, how far that is from life, and how long a method runs.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spantrain.app.profiling.slowing import SOUND_REAL_COMPUTE
from spantrain.core.cluster import Cluster, Site
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """What compute weighs beside traffic."""

    cuts: float
    sums: float
    latency: float
    """Zero where there is one site: what its hosts have between them is too short to be emulated."""


@dataclass(frozen=True, kw_only=True)
class ScaleMatch:
    """What makes a small model weigh on a network as a large one does."""

    full_size: str
    """The model that it stands for."""
    full_global_batch: float
    """Batch of that model, in samples of its size here."""
    global_batch: int
    network_speed: float
    """Part of the cluster's rates that links get."""
    latency_scale: float
    """What latencies are multiplied by."""
    full: Ratios
    """Ratios of the large model on the cluster at life's speed."""
    here: Ratios
    """Ratios of the small one on the emulated cluster."""
    bounded: tuple[str, ...] = ()
    """What could not be made alike, and why."""

    @property
    def text(self) -> str:
        """Say it in a line."""
        pairs = ((name, getattr(self.here, name), getattr(self.full, name)) for name in ("cuts", "sums", "latency"))
        said = ", ".join(f"{name} {here:.3g} (there {full:.3g})" for name, here, full in pairs)
        bounds = "".join(f"; {text}" for text in self.bounded)
        return f"like {self.full_size} with {self.full_global_batch:.4g} samples a step; compute over {said}{bounds}"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What was changed of a cluster so that this machine can emulate it."""

    devices: int
    devices_before: int
    emulated_speed: float | None
    """Part of their kinds' speed; None: devices are real."""
    network_speed: float
    """Part of the cluster's rates that its links have, inside sites too."""
    compute_to_traffic: float | None
    """Seconds of one sample on the fastest device over those of its smallest cut on the slowest link."""
    latency_scale: float = 1.0
    """What the latencies of links between sites were multiplied by."""
    like: ScaleMatch | None = None
    """The full-size model whose ratios of compute to traffic were kept; None: links are as they were asked for."""

    @property
    def text(self) -> str:
        """Say it in a line."""
        return "; ".join(filter(None, (self.changes, self.ratio if self.like is None else self.like.text)))

    @property
    def changes(self) -> str:
        """Say what was changed."""
        speed = "" if self.emulated_speed is None else f"; at {self.emulated_speed:.3g} of their kinds' speed"
        devices = f"{self.devices} of {self.devices_before} devices{speed or ', real ones'}"
        links = "" if self.network_speed == 1.0 else f"; links at {self.network_speed:.3g} of their rates"
        return devices + links + ("" if self.latency_scale == 1.0 else f" and {self.latency_scale:.3g} times as far")

    @property
    def ratio(self) -> str:
        """Say what compute weighs beside traffic; nothing where nothing is sent."""
        if self.compute_to_traffic is None:
            return ""
        return (
            f"a sample computes {self.compute_to_traffic:.3g} times as long on the fastest device as its smallest cut "
            "takes on the slowest link"
        )


def cut_down(cluster: Cluster, devices_per_site: int | None) -> Cluster:
    """Return the cluster with so many devices at each site, taken from its hosts in turn; hosts left empty are gone."""
    if devices_per_site is None:
        return cluster
    if devices_per_site < 1:
        raise ConfigError(f"--devices-per-site must be at least 1, got {devices_per_site}")
    kept: set[str] = set()
    for site in cluster.sites:
        rows = [cluster.host_by_name[name].devices for name in site.hosts]
        turns = [row[turn] for turn in range(max(map(len, rows))) for row in rows if turn < len(row)]
        kept.update(turns[:devices_per_site])
    hosts = tuple(replace(host, devices=tuple(name for name in host.devices if name in kept)) for host in cluster.hosts)
    left = tuple(host for host in hosts if host.devices)
    names = {host.name for host in left}
    return replace(
        cluster,
        devices=tuple(device for device in cluster.devices if device.name in kept),
        hosts=left,
        sites=tuple(replace(site, hosts=tuple(name for name in site.hosts if name in names)) for site in cluster.sites),
    )


def with_bandwidth(cluster: Cluster, bandwidth_bytes_per_s: float | None) -> Cluster:
    """Return the cluster with this rate on all links between sites; with one site only, between its hosts."""
    if bandwidth_bytes_per_s is None:
        return cluster
    if not cluster.links:
        sites = (replace(site, bandwidth_bytes_per_s=bandwidth_bytes_per_s) for site in cluster.sites)
        return replace(cluster, sites=tuple(sites))
    links = (replace(link, bandwidth_bytes_per_s=bandwidth_bytes_per_s) for link in cluster.links)
    return replace(cluster, links=tuple(links))


def at_network_speed(cluster: Cluster, speed: float) -> Cluster:
    """Return the cluster with all rates times this, inside sites, between them, and of their lines."""
    if not speed > 0:
        raise ConfigError(f"--network-speed must be positive, got {speed}")
    if speed == 1.0:
        return cluster
    links = (replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * speed) for link in cluster.links)
    return replace(cluster, links=tuple(links), sites=tuple(_site_at(site, speed) for site in cluster.sites))


def _site_at(site: Site, speed: float) -> Site:
    up, down = site.uplink_bandwidth_bytes_per_s, site.downlink_bandwidth_bytes_per_s
    return replace(
        site,
        bandwidth_bytes_per_s=site.bandwidth_bytes_per_s * speed,
        uplink_bandwidth_bytes_per_s=None if up is None else up * speed,
        downlink_bandwidth_bytes_per_s=None if down is None else down * speed,
    )


def with_latencies(cluster: Cluster, scale: float) -> Cluster:
    """Return the cluster with the latencies of its links times this, jitter with them."""
    links = (replace(link, latency_s=link.latency_s * scale, jitter_s=link.jitter_s * scale) for link in cluster.links)
    return replace(cluster, links=tuple(links))


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One method, run once."""

    step_s: tuple[float, ...]
    """Seconds of the steps behind the warm-up."""
    losses: tuple[float, ...]
    """Loss of each step."""
    utilisation: Mapping[str, float]
    """By device in use: device time computing, over step time."""
    peak_bytes: Mapping[str, int]
    real_compute_ratio: float | None
    """Real seconds per emulated second, on the device that computed most; None: devices are real."""
    link_bytes: Mapping[str, float]
    """A step's, by link between sites; headers and all."""
    host_bytes: Mapping[str, float]
    """A step's, sent by each host."""


@dataclass(frozen=True, kw_only=True)
class MethodFigures:
    """One row."""

    what: str
    """How it was run: devices, micro-batches, what was left out and why."""
    devices: tuple[str, ...]
    samples_per_s: float
    """Rate of the median step over all rounds; where links change, of the mean one."""
    samples_per_s_by_round: tuple[float, ...]
    ratio_to_first: float
    """Its samples per second over the first method's."""
    bytes: Mapping[str, float]
    """A step's, by link between sites (`lab->office`)."""
    host_bytes: Mapping[str, float]
    """A step's, sent by each host, inside its site and beyond."""
    utilisation: float
    """Mean over the devices in use."""
    peak_bytes: int
    """Bytes on the fullest device: parameters, gradients, optimizer state and samples in flight."""
    steps: int
    """Steps of a round; fewer than others' where a step takes long."""
    loss_last: float
    """After its own steps."""
    losses: tuple[float, ...]
    loss_error: float
    """The most by which a step's loss differs from one process's."""
    real_compute_ratio: float | None
    """Real seconds per emulated second, on the device where it was largest; None: devices are real."""
    step_s_predicted: float | None = None
    """By our simulator, of plans that it made."""

    @property
    def sound(self) -> bool:
        """Whether real computation was a small part of the emulated time, or all of a real one."""
        return self.real_compute_ratio is None or self.real_compute_ratio <= SOUND_REAL_COMPUTE


@dataclass(frozen=True, kw_only=True)
class ComparisonBounds:
    """Samples per second that no method of a sort can pass, with devices and links as they are emulated."""

    compute: float | None = None
    """Any method: all devices at work all the time, each on as large batches as there are; None: devices are real."""
    compute_best_site: float | None = None
    """Any method inside the best site."""
    link_data_parallel: float | None
    """Sums over all sites: every site must hear of the others' gradients, once each step."""
    link_pipeline: float | None
    """Every sample at every site: its activations or their gradients come there, through the smallest cut."""
    latency: float | None
    """Any method over all sites: in each step something comes from the farthest one."""
    chosen_plan: float | None = None
    """The plan of `auto` under any order of work."""


@dataclass(frozen=True, kw_only=True)
class ComparedSetting:
    """What was the same for all methods."""

    cluster: str
    model: str
    methods: tuple[str, ...]
    """In the order asked for; ratios are over the first."""
    global_batch: int
    steps: int
    warm_up_steps: int
    rounds: int
    """Methods of which there is time for less than four steps run in the first one only."""
    seconds_per_method: float
    """Seconds that a method's steps of a round take at most, if not a single one takes longer."""
    optimizer: str
    seed: int
    planned_by: str
    """What plans were made from."""
    network: str
    network_trace: str
    """How links changed in every run; empty: they did not."""
    scale: Scale
    cores: int


@dataclass(frozen=True, kw_only=True)
class CompareOutcome:
    """All rows, and what they are to be read with."""

    methods: Mapping[str, MethodFigures]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Methods that could not run here, and why."""
    bounds: ComparisonBounds
    setting: ComparedSetting
    emulated: str
    """What was emulated and what was real."""
    left_out: tuple[str, ...] = ()
    """What of the model as it was given no method does, a line each."""
    rounding_error: float | None = None
    """The most by which one process's own losses differ where it cuts the batch otherwise; None: of few steps, which
    leave rounding as small as it is."""
    is_complete: bool = True
    """Whether all methods had all their rounds; False: it was ended before."""


def figures_of(
    runs: Sequence[MeasuredRun],
    *,
    what: str,
    global_batch: int,
    first_samples_per_s: float | None,
    reference: Sequence[float],
    changing: bool = False,
    step_s_predicted: float | None = None,
) -> MethodFigures:
    """Return the row of a method from its runs, one a round.

    Args:
        runs: in order.
        what: how it was run.
        global_batch: samples of a step.
        first_samples_per_s: of the first method; None: this is the first.
        reference: losses of one process, of as many steps or more.
        changing: whether links change meanwhile: then the mean step counts, not the median one.
        step_s_predicted: by our simulator.
    """
    middle = statistics.fmean if changing else statistics.median
    samples_per_s = global_batch / middle([seconds for run in runs for seconds in run.step_s])
    last = runs[-1]
    errors = [abs(a - b) for run in runs for a, b in zip(run.losses, reference, strict=False)]
    return MethodFigures(
        what=what,
        devices=tuple(last.utilisation),
        samples_per_s=samples_per_s,
        samples_per_s_by_round=tuple(global_batch / middle(run.step_s) for run in runs),
        ratio_to_first=samples_per_s / (first_samples_per_s or samples_per_s),
        bytes=_means([run.link_bytes for run in runs]),
        host_bytes=_means([run.host_bytes for run in runs]),
        utilisation=statistics.fmean(value for run in runs for value in run.utilisation.values()),
        peak_bytes=max(value for run in runs for value in run.peak_bytes.values()),
        steps=len(last.losses),
        loss_last=last.losses[-1],
        losses=last.losses,
        loss_error=max(errors),
        real_compute_ratio=max((part for run in runs if (part := run.real_compute_ratio) is not None), default=None),
        step_s_predicted=step_s_predicted,
    )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


WARM_UP_STEPS = 2


def steps_within(steps: int, step_s: float, most_s: float) -> tuple[int, int]:
    """Return how many steps to run, at least one, and how many of them, the first ones, not to count.

    Steps that are left out are those of a method whose steps are so long that warming up is a small part of one. Where
    one step has the time, a second one is run too, and where two have it, a third: so the first need not count.

    Args:
        steps: that are run where there is time; two or more.
        step_s: what a step takes, as far as that is known.
        most_s: that all may take together.

    >>> [steps_within(8, step_s, 30.0) for step_s in (0.5, 7.0, 14.0, 20.0, 100.0)]
    [(8, 2), (4, 2), (3, 1), (2, 1), (1, 0)]
    """
    least = min(3, 1 + int(most_s / step_s))
    count = max(least, min(steps, int(most_s / step_s)))
    return count, WARM_UP_STEPS if count == steps else min(WARM_UP_STEPS, count // 2)


def worth_trying(step_s: float, most_s: float, trials: int) -> bool:
    """Whether there is time for so many steps to try ways for real; else the simulator's word on them has to do."""
    return trials * step_s <= most_s


def slowest_rate(cluster: Cluster) -> float | None:
    """Return the least rate between sites and inside those of several hosts, bytes per second; None: there is none."""
    rates = [link.bandwidth_bytes_per_s for link in cluster.links]
    rates += [site.bandwidth_bytes_per_s for site in cluster.sites if len(site.hosts) > 1]
    return min(rates, default=None)


def plan_text(plan: Plan) -> str:
    """Return in short how a plan trains."""
    sizes = [max(span.size for span in stage.micro_batches) for stage in plan.stages]
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    return f"{stages} on {len(plan.devices)} devices, micro-batches of {max(sizes)}, {plan.schedule}"
