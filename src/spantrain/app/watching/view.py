"""What there is to see of a run, as one file in its folder: `view.json`, written anew while the run goes on."""

from collections.abc import Mapping
from pathlib import Path

from spantrain.app.watching.chain import StepReason
from spantrain.config.artefacts import VIEW_FORMAT, read_artefact
from spantrain.core.records import Record
from spantrain.devices.meters import MeterReading
from spantrain.errors import ConfigError

VIEW_FILE = "view.json"
RUNNING, ENDED, FAILED = "running", "ended", "failed"
Work = tuple[str, float, float]
"""What a device did, from when to when, in seconds from the step's first work on."""


class SeenDevice(Record):
    """One device: what it has, does and holds, beside what was forecast."""

    name: str
    site: str
    kind: str
    stage: int | None
    """None: it has no part in the plan that runs."""
    part: str
    """Of its stage's samples, as text; or why it has none."""
    memory_bytes: int
    peak_bytes_forecast: int | None = None
    peak_bytes: int | None = None
    """The most that its tensors held at once; None where nobody knows."""
    held_samples: int | None = None
    """The most that it held at once in the last step."""
    held_samples_forecast: int | None = None
    busy_ratio: float | None = None
    """Of the last step."""
    busy_ratio_forecast: float | None = None
    meters: MeterReading | None = None
    """What its own meters said last; None: it has none."""


class SeenLink(Record):
    """One direction between two sites."""

    source: str
    target: str
    latency_s: float
    planned_bytes_per_s: float
    """What one transfer gets, as the plan was made for."""
    bytes_per_s: float | None
    """What the newest messages got, as senders measure it who share the link; None: none was large enough."""
    usual_bytes_per_s: float | None
    """The same in the middle of the run so far: where it is now far less, the link has become slow."""
    used_bytes_per_s: float
    """What went over it in the last step, over the step's duration; sums of gradients are not counted."""


class SeenStage(Record):
    """One stage of the plan that runs."""

    first_unit: int
    end_unit: int
    devices: tuple[str, ...]


class SeenEvent(Record):
    """Something that was told while the run went on."""

    at_unix_s: float
    steps_done: int
    text: str


class Timeline(Record):
    """One step: what each device did, measured and as forecast, and the messages between them."""

    step: int
    """Counted from 0, as in traces."""
    duration_s: float
    work: Mapping[str, tuple[Work, ...]]
    work_forecast: Mapping[str, tuple[Work, ...]]
    messages: tuple[tuple[str, str, str, float, float], ...]
    """Source, target, what, when it had been made and when it had come."""


class RunView(Record):
    """All that there is to see."""

    run: str
    """The folder's name."""
    model: str
    schedule: str
    generation: int
    global_batch: int
    state: str
    """`running`, `ended` or `failed`."""
    ending: str
    """How it ended, if it has."""
    updated_unix_s: float
    steps: int
    """Wanted in all."""
    steps_done: int
    step_s: float | None
    """Of the last step."""
    typical_step_s: float | None
    """Median of the last steps under the plan."""
    step_s_forecast: float | None
    tokens_per_s: float | None
    losses: tuple[tuple[int, float | None], ...]
    """(steps done, loss), of a long run not of every step; None: it was no finite number."""
    evaluations: tuple[tuple[int, float | None], ...]
    sites: tuple[str, ...]
    links: tuple[SeenLink, ...]
    stages: tuple[SeenStage, ...]
    devices: tuple[SeenDevice, ...]
    events: tuple[SeenEvent, ...]
    timeline: Timeline | None = None
    """Of the last step that was recorded."""
    reason: StepReason | None = None
    """Why that step took so long."""
    unfinished: Timeline | None = None
    """Of a run that lost a device: the step that was under way, as those that were left had recorded it."""


def read_view(folder: Path) -> RunView:
    """Return what there is to see of the run in a folder.

    Raises:
        ConfigError: there is no such folder, or no run has written what there is to see; or the file is wrong.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name the folder of a run (train --out)")
    return read_artefact(RunView, VIEW_FORMAT, folder / VIEW_FILE)
