"""Where scalars go besides the run's own file: TensorBoard, Weights & Biases, Trackio, MLflow; each is optional."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spantrain.core.records import Record
from spantrain.errors import ConfigError

_PROJECT = "spantrain"
_LONGEST_VALUE = 500
"""Characters of a parameter that MLflow takes."""


class TrackedRun(Record):
    """What trackers are told of a run when it begins."""

    name: str
    project: str
    """Empty: as the tracker's own environment says, or else the tracker's default."""
    folder: Path
    config: Mapping[str, Any]
    first_step: int = 0
    """Steps done before: what the folder has of later ones is done again."""


Tracker = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]
"""What takes a step's scalars, by their tags, and what hands over what is left."""


def _tensorboard(module: Any, run: TrackedRun) -> Tracker:
    writer = module.SummaryWriter(str(run.folder), purge_step=run.first_step + 1 if run.first_step else None)

    def log(scalars: Mapping[str, float], step: int) -> None:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)

    return log, writer.close


def _wandb(module: Any, run: TrackedRun) -> Tracker:
    tracked = module.init(project=run.project or None, name=run.name, config=dict(run.config))
    return lambda scalars, step: tracked.log(dict(scalars), step=step), tracked.finish


def _trackio(module: Any, run: TrackedRun) -> Tracker:
    module.init(project=run.project or _PROJECT, name=run.name, config=dict(run.config))
    return lambda scalars, step: module.log(dict(scalars), step=step), module.finish


def _mlflow(module: Any, run: TrackedRun) -> Tracker:
    if run.project:
        module.set_experiment(run.project)
    module.start_run(run_name=run.name)
    module.log_params({name: str(value)[:_LONGEST_VALUE] for name, value in run.config.items()})
    return lambda scalars, step: module.log_metrics(dict(scalars), step=step), module.end_run


_TRACKERS: Mapping[str, tuple[str, str, Callable[[Any, TrackedRun], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", "'spantrain[tensorboard]'", _tensorboard),
    "wandb": ("wandb", "wandb", _wandb),
    "trackio": ("trackio", "trackio", _trackio),
    "mlflow": ("mlflow", "mlflow", _mlflow),
}
"""By name: the module, what pip installs, and what begins a run."""


class Trackers:
    """All trackers of a run; one that fails is left out from then on, and the run goes on."""

    def __init__(self, names: Sequence[str], run: TrackedRun, tell: Callable[[str], None]) -> None:
        """Begin a run with each; `tell` says a line to the user.

        Raises:
            ConfigError: the package of one is not installed, or refuses to begin.
        """
        self._tell = tell
        self._open: dict[str, Tracker] = {}
        modules = {name: tracker_module(name) for name in names}
        for name, module in modules.items():
            try:
                self._open[name] = _TRACKERS[name][2](module, run)
            except Exception as error:
                self.close()
                raise ConfigError(f"report_to {name}: cannot begin: {type(error).__name__}: {error}") from error

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Give scalars to each, by the tags that the transformers library's trainer uses: `train/loss`, `eval/loss`."""
        self._each(lambda tracker: tracker[0](scalars, step))

    def close(self) -> None:
        """End the run with each."""
        self._each(lambda tracker: tracker[1]())
        self._open.clear()

    def _each(self, do: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                do(tracker)
            except Exception as error:  # noqa: BLE001 - code of others; hours of training are not its to end
                del self._open[name]
                self._tell(f"report_to {name}: {type(error).__name__}: {error}; the run goes on without it")


def tracker_module(name: str) -> Any:
    """Return the package of a tracker.

    Raises:
        ConfigError: it is not installed.
    """
    module, wheel, _ = _TRACKERS[name]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"report_to {name}: {name} is not installed; run: pip install {wheel}") from None


def chosen_trackers(given: object) -> tuple[str, ...]:
    """Return the trackers of a name or several; `none` is none.

    Raises:
        ConfigError: there is no such tracker, or its package is not installed.
    """
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, (list, tuple)) else None
    known = ", ".join(_TRACKERS)
    if names is None or any(name not in (*_TRACKERS, "none") for name in names):
        raise ConfigError(f"report_to: must be none, or one or more of {known}, got {given!r}")
    wanted = tuple(dict.fromkeys(name for name in names if name != "none"))
    for name in wanted:
        tracker_module(name)
    return wanted


def tagged(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return scalars by their tags: those of evaluations under `eval/`, others under `train/`.

    >>> tagged({"eval_loss": 2.0, "epoch": 1.0})
    {'eval/loss': 2.0, 'train/epoch': 1.0}
    """
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in scalars.items()
    }
