"""What a comparison found: figures of each method, bounds, the setting; the JSON that `spantrain compare` writes.

Also for how long a method may be measured.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spantrain.app.comparison.setting import Scale
from spantrain.app.profiling.slowing import SOUND_REAL_COMPUTE


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method, run once."""

    step_s: tuple[float, ...]
    """Of the steps behind the warm-up."""
    losses: tuple[float, ...]
    """Of all steps."""
    utilisation: Mapping[str, float]
    """By device in use: device time computing, over step time."""
    peak_bytes: Mapping[str, int]
    real_compute_ratio: float
    """Of the device that computed most: real seconds per emulated second."""
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
    """Of the median step over all rounds; where links change, of the mean one."""
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
    """Of the fullest device: parameters, gradients, optimizer state and samples in flight."""
    steps: int
    """Of a round; fewer than others' where a step takes long."""
    loss_last: float
    """After its own steps."""
    losses: tuple[float, ...]
    loss_error: float
    """The most by which a step's loss differs from one process's."""
    real_compute_ratio: float
    """Real seconds per emulated second, on the device where it was largest."""
    step_s_predicted: float | None = None
    """By our simulator, of plans that it made."""

    @property
    def sound(self) -> bool:
        """Whether real computation was a small part of the emulated time."""
        return self.real_compute_ratio <= SOUND_REAL_COMPUTE


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Samples per second that no method of a sort can pass, with devices and links as they are emulated."""

    compute: float
    """Any method: all devices at work all the time, each on as large batches as there are."""
    compute_best_site: float
    """Any method inside the best site."""
    link_data_parallel: float | None
    """Sums over all sites: every site must hear of the others' gradients, once each step."""
    link_pipeline: float | None
    """Every sample at every site: its activations or their gradients come there, through the smallest cut."""
    latency: float | None
    """Any method over all sites: in each step something comes from the farthest one."""
    chosen_plan: float | None
    """The plan of `auto` under any order of work."""


@dataclass(frozen=True, kw_only=True)
class Setting:
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
    """That a method's steps of a round take at most, if not a single one takes longer."""
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
    bounds: Bounds
    setting: Setting
    emulated: str
    """What was emulated and what was real."""
    left_out: tuple[str, ...] = ()
    """What of the model as it was given no method does, a line each."""


def figures_of(
    runs: Sequence[Run],
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
        real_compute_ratio=max(run.real_compute_ratio for run in runs),
        step_s_predicted=step_s_predicted,
    )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


WARM_UP_STEPS = 2
_TRIALS = 4
"""Two ways to set a framework up, two steps of each."""


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


def worth_trying(step_s: float, most_s: float) -> bool:
    """Whether there is time to try ways for real; else the simulator's word on them has to do."""
    return _TRIALS * step_s <= most_s
