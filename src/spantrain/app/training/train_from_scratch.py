"""From a model's name to training in one go: measure, plan, train; each part's file is kept as if made by itself."""

import datetime
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path

import torch

from spantrain.app.planning.plan_files import write_plans
from spantrain.app.profiling.describe import described_profile
from spantrain.app.profiling.profile import ProfileOptions, measure_profile
from spantrain.app.profiling.slowing import slowed
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.recovery.journal import can_go_on, credentials_in
from spantrain.app.training.requests import Grouping, RunOptions, TrainRequest, new_run
from spantrain.app.training.run_folder import alone_in, remove_old_run
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.app.weight_folder import first_weights
from spantrain.config.artefacts import read_profile, write_profile
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.errors import UsageError
from spantrain.models.build import unit_names
from spantrain.models.data.chat import ChatSamples
from spantrain.models.data.choice import data_paths, user_functions
from spantrain.models.data.dataset import open_dataset
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec
from spantrain.version import VERSION

_RUNS = Path("runs")
_PROFILE_FILE = "profile.json"
_PLAN_FILE = "plan.json"


class ScratchRequest(Record):
    """What is to be trained, on what, and how."""

    cluster: Cluster
    """Its emulated devices are slowed where this machine could not keep up, unless `own_speed` is set."""
    model: ModelSpec
    job: TrainJob
    out: Path
    own_speed: bool = False
    """Leave emulated devices at the cluster's speed."""
    global_batch: int = 32
    dtype: str = "float32"
    schedule: str = "critical-path"
    options: RunOptions = field(default_factory=RunOptions)
    recompute: bool | None = None
    """Compute all activations again, or none; None: where memory is short."""
    grouping: Grouping | None = None
    """Puts parameters into groups with options of their own."""
    from_scratch: bool = False
    """Leave the weights that an `hf:` folder has."""
    overwrite: bool = False
    """Remove the run that the folder holds."""


def run_folder_for(model: str, now: datetime.datetime, runs: Path = _RUNS) -> Path:
    """Return a folder under `runs` that is not there yet, named by the model and the time.

    >>> run_folder_for("examples/my_model.py:build", datetime.datetime(2026, 5, 4, 3, 2, 1), Path("none")).as_posix()
    'none/my_model-build-20260504-030201'
    """
    last = re.sub(r"\.(py|json)\b", "", model.rstrip("/").rpartition("/")[2])
    name = re.sub(r"[^\w.]+", "-", last).strip("-.") or "model"
    folder = runs / f"{name}-{now:%Y%m%d-%H%M%S}"
    taken = (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000)))
    return next(candidate for candidate in taken if not candidate.exists())


def train_from_scratch(
    request: ScratchRequest, options: SessionOptions, stop: StopRequest, listener: Reporter
) -> tuple[TrainOutcome, TrainRequest]:
    """Do all of it with one set of workers; return what training gave, and what was trained.

    Raises:
        UsageError: as `measure_profile`, `make_plan` and `new_run`.
        WorkerError, PeerLostError: a device failed or was lost; the run has been ended everywhere.
    """
    # What cannot be had or cut is refused before anything is written or started; others' data lie on their machines.
    unit_names(request.model)
    first_weights(request.model, from_scratch=request.from_scratch)
    if options.listen is None:
        data = open_dataset(request.model)
        if isinstance(data, ChatSamples):
            listener.note(f"Data: {data.note}")
    names = tuple(device.name for device in request.cluster.devices)
    if request.overwrite:
        remove_old_run(request.out)
    listener.note(f"The run's folder: {request.out}")
    with _workers(request.cluster, names, request.model, request.out, options, listener) as session:
        run = prepare(session, request, listener)
        return train(session, run, stop, listener), run


def train_request(
    request: TrainRequest, options: SessionOptions, stop: StopRequest, listener: Reporter
) -> tuple[TrainOutcome, TrainRequest]:
    """Train what a plan, or an earlier run, says; return what training gave, and what was trained.

    Raises:
        WorkerError, PeerLostError: a device failed or was lost; the run has been ended everywhere.
    """
    plan, options = request.plan, replace(options, is_enough=partial(can_go_on, request))
    with _workers(plan.cluster, plan.devices, plan.model, request.out, options, listener) as session:
        return train(session, request, stop, listener), request


@contextmanager
def _workers(
    cluster: Cluster, names: Sequence[str], model: ModelSpec, out: Path, options: SessionOptions, listener: Reporter
) -> Iterator[Session]:
    """Bring up workers that may call and read what a model names.

    Raises:
        ConfigError: another run is under way in the folder.
    """
    functions, data = user_functions(model), data_paths(model)
    options = replace(options, functions=functions, data=data, credentials=credentials_in(out))
    with alone_in(out), open_session(cluster, names, options, out / "logs", listener) as session:
        yield session


def describe(request: ScratchRequest, listener: Reporter) -> TrainRequest:
    """Plan by data sheets, with nothing measured: at once, and for no more than to have a plan; return what is to run.

    Raises:
        UsageError: as `make_plan` and `new_run`.
    """
    request.out.mkdir(parents=True, exist_ok=True)
    profile = described_profile(request.cluster, request.model, dtype=request.dtype)
    write_profile(profile, request.out / _PROFILE_FILE)
    return _planned(profile, request, listener)


def prepare(session: Session, request: ScratchRequest, listener: Reporter) -> TrainRequest:
    """Measure (unless the folder has a profile that still holds) and plan; return what is to be trained.

    Raises:
        UsageError: as `measure_profile`, `make_plan` and `new_run`.
    """
    profile_path = request.out / _PROFILE_FILE
    profile = kept_profile(profile_path, session.network, request)
    if profile is None:
        if not request.own_speed:
            own = session.cluster
            own, says = slowed(own, request.model, dtype=request.dtype, global_batch=request.global_batch)
            session = replace(session, cluster=own)
            if says:
                listener.note(says)
        profile = measure_profile(session, request.model, ProfileOptions(dtype=request.dtype), listener)
        write_profile(profile, profile_path)
    else:
        listener.note(f"The profile of {profile.provenance.created} in {profile_path} still holds: not measured again")
    return _planned(profile, request, listener)


def _planned(profile: Profile, request: ScratchRequest, listener: Reporter) -> TrainRequest:
    listener.phase(f"Planning for {request.global_batch} samples a step")
    spec = JobSpec(
        global_batch=request.global_batch,
        optimizer=request.job.optimizer_state,
        dtype=request.dtype,
        schedule=request.schedule,
    )
    constraints = Constraints(
        recompute=request.recompute is not False,
        recompute_all=bool(request.recompute),
        interleaving=not request.job.staleness,
    )
    planned = make_plan(profile, spec, PlanOptions(constraints=constraints))
    planned = write_plans(planned, profile, request.out / _PROFILE_FILE, request.out / _PLAN_FILE)
    listener.show_plan(planned)
    run = new_run(
        request.out / _PLAN_FILE,
        request.job,
        request.out,
        functions=user_functions(request.model),
        from_scratch=request.from_scratch,
        grouping=request.grouping,
    )
    return replace(run, options=request.options)


def kept_profile(path: Path, network: str, request: ScratchRequest) -> Profile | None:
    """Return the profile that lies there, if it answers the same question, with links of the same sort."""
    if not path.exists():
        return None
    try:
        profile = read_profile(path)
    except UsageError:
        return None
    made, asked = profile.provenance, request.cluster
    if not request.own_speed and profile.cluster.emulated_speed <= asked.emulated_speed:
        asked = replace(asked, emulated_speed=profile.cluster.emulated_speed)
    same = (
        profile.cluster == asked
        and profile.model == request.model
        and profile.dtype == request.dtype
        and (made.spantrain_version, made.torch_version) == (VERSION, torch.__version__)
        and made.method.endswith(f"links: {network}")
    )
    return profile if same else None
