"""What is to be trained, how and where: from a plan or an earlier run's checkpoint; and the weights to begin with."""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TypedDict

from spantrain.app.faults import Fault
from spantrain.app.planning import plan_files
from spantrain.app.planning.protection import about_keepers, light_change, with_keepers
from spantrain.app.training.metrics import BestCheckpoint, EvaluationMetrics
from spantrain.app.training.resume import Resume
from spantrain.app.weight_folder import FirstWeights, first_weights
from spantrain.app.weights import write_weights
from spantrain.config.artefacts import profile_at, profile_path_of, read_plan_report, read_profile
from spantrain.config.files.problems import shortened
from spantrain.config.traces.network_traces import NetworkTrace
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.job import TrainJob
from spantrain.core.names import few
from spantrain.core.outer.stages import OuterCluster
from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.core.update.optimizers import division_refusal
from spantrain.errors import ConfigError, PlanError
from spantrain.models.data.choice import with_own_functions
from spantrain.models.sources import DROPOUT
from spantrain.planner.present import NewPlan
from spantrain.recovery.policy import OnLoss
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest
from spantrain.runtime.coordinator.advice import Adviser
from spantrain.runtime.coordinator.batches import EXTERNAL, BatchQueue
from spantrain.schedule.at_once import about_samples, check_samples_at_once
from spantrain.schedule.joint import check_joint, joint_refusal, statistics_spans
from spantrain.schedule.layout import check_limits


class RunOptions(Record):
    """What a run keeps and follows, beside its plan and its job; no checkpoint has it."""

    keep_checkpoints: int = 2
    """So many complete ones stay, the newest."""
    report_to: tuple[str, ...] = ()
    """Names of trackers (`app.training.trackers`) that get scalars; those of TensorBoard lie under `tensorboard`."""
    run_name: str = ""
    """For trackers; empty: the folder's."""
    project: str = ""
    """For trackers; empty: their own."""
    logging_steps: int = 1
    """Steps between scalars, whose loss is the mean over them; 0: none."""
    dataset_size: int | None = None
    """Samples of a data set in this process; None: workers say it."""
    network_trace: NetworkTrace | None = None
    """How the emulated links change from the first step on."""
    outer: OuterCluster | None = None
    """As whom the run takes part in an outer optimizer; its token is written nowhere."""
    on_loss: OnLoss = OnLoss.GO_ON
    gather: bool = True
    """Whether what other machines save is brought to this one, too."""
    standby_coordinator: str = ""
    """The device whose machine is to take this one's place if that is lost; empty: none."""
    protect: int | None = 0
    """So many losses at once are to cost the step under way and no more (`app.planning.protection`)."""
    faults: tuple[Fault, ...] = ()
    """Made on purpose."""


class TrainRequest(Record):
    """What to train, how, and where to write."""

    plan: Plan
    profile: Profile
    profile_path: str
    """For the checkpoint, so that it can be resumed."""
    job: TrainJob
    out: Path
    known_as: str = ""
    """The run's folder as workers know it, where it was begun on another machine; empty: `out`."""
    report: PlanReport = field(default_factory=PlanReport)
    """What is said of the plan."""
    options: RunOptions = field(default_factory=RunOptions)
    checkpoints: bool = True
    resume: Resume | None = None
    batches: BatchQueue | None = None
    """Where a user's own loop puts its batches, one a step; the model's data set is then `given`."""
    take_evaluations: Callable[[Callable[[EvaluationMetrics], None]], None] | None = None
    """Is handed what takes evaluations that whoever gives batches makes between two steps."""
    last_evaluation: Callable[[], EvaluationMetrics] | None = None
    """Evaluates when all steps are done, where batches are given."""
    best: BestCheckpoint = field(default_factory=BestCheckpoint)
    """Which checkpoint is the best so far."""
    adviser: Adviser | None = None
    """Who looks for better plans while it runs; None: the job's adapter."""
    calm_plan: Plan | None = None
    """Plan that was made for links as planned, where a run goes on under another one."""
    weights: FirstWeights = field(default_factory=FirstWeights)
    """What a new run begins with."""

    def __post_init__(self) -> None:
        self.job.about_statistics(self.plan.model, self.profile.graph)
        self.check_plan(self.plan)
        self._check_standby()
        if self.job.staleness:
            plan = plan_files.with_room_for_two(self.plan, self.profile, self.job.optimizer_state)
            plan_files.check_staleness(plan, self.profile, self.job, own_loop=self.batches is not None)
        resized = not (self.plan.interleaved or self.options.outer or any(s.divides_state for s in self.plan.stages))
        if self.job.adapter == "paper" and not resized:
            raise ConfigError(
                "--adapter paper changes micro-batches, which stay as they are where devices have several stages or "
                "divide state, and with an outer optimizer; train with --adapter auto"
            )
        if self.options.protect and not self._keeps_state:
            raise ConfigError(
                f"--protect {self.options.protect} keeps state for a run that goes on after a loss; leave it out with "
                "--on-loss end, --staleness 1 and an outer optimizer"
            )

    def folder_to_workers(self, folder: Path) -> str:
        """Return a folder as workers know it: in the run's, or elsewhere."""
        here, out = folder.resolve(), self.out.resolve()
        return str(Path(self.known_as) / here.relative_to(out) if self.known_as and here.is_relative_to(out) else here)

    @property
    def is_journalled(self) -> bool:
        """Whether workers can go on under a coordinator that is started again with what they hold."""
        return not (self.job.staleness or self.options.outer or self.batches)

    def protected(self, plan: Plan) -> Plan:
        """Return a plan with the keepers that this run wants."""
        return with_keepers(plan, self.profile, self.job.optimizer_state, self._losses)

    def light_change(self, plan: Plan, present: frozenset[str]) -> NewPlan:
        """Return the light change of a plan of this run for devices that are left; raises as `light_plan` does."""
        optimizer = self.job.optimizer_state
        return light_change(plan, self.profile, present, optimizer=optimizer, losses=self._losses)

    @property
    def _keeps_state(self) -> bool:
        options = self.options
        return options.on_loss is OnLoss.GO_ON and not self.job.staleness and not options.outer

    @property
    def _losses(self) -> int | None:
        return self.options.protect if self._keeps_state else 0

    def _check_standby(self) -> None:
        name = self.options.standby_coordinator
        if name and name not in self.plan.devices:
            raise ConfigError(
                f"--standby-coordinator {name}: give a device of the plan; it has {few(self.plan.devices)}"
            )
        if name and not self.is_journalled:
            raise ConfigError(
                f"--standby-coordinator {name}: runs with --staleness 1, an outer optimizer or batches from a loop of "
                "yours go on from checkpoints alone; leave it out"
            )

    def with_first_weights(self) -> "TrainRequest":
        """Return the request that goes on from its first weights, where it has some: a checkpoint at step 0."""
        if self.weights.found is None:
            return self
        manifest = Manifest(
            step=0, model=self.plan.model, plan=self.plan, report=self.report, job=self.job, profile=self.profile_path,
            losses=(), ledger=SampleLedger(),
        )  # fmt: skip
        folder = write_weights(self.weights.found, self.out, manifest)
        return replace(self, resume=Resume.of(folder, read_manifest(folder, check_files=False)))

    def finished(self, plan: Plan) -> Plan:
        """Return another plan for this run as it can take over.

        Raises:
            PlanError: as `check_plan`.
        """
        self.check_plan(plan)
        return self.protected(plan)

    def check_plan(self, plan: Plan) -> None:
        """Raise a `PlanError` if a plan would wait for ever, has too few samples at once, or divides too much."""
        check_samples_at_once(plan, self.profile.graph)
        check_divided(plan, self.job)
        check_joint(plan, self.profile.graph, statistics=self.job.joins_statistics)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What of the model as it was given is not done, a line each."""
        line = self.job.about_statistics(self.plan.model, self.profile.graph)
        frozen = line and not self.job.takes_batch_statistics(self.plan.model)
        return (*self.profile.graph.left_out, *((line,) if frozen else ()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is said before it runs, a line each."""
        line = self.job.about_statistics(self.plan.model, self.profile.graph)
        weights = (self.weights.text,) if self.weights.text else ()
        left_out = (f"Not as the model was given: {one}" for one in self.left_out)
        statistics: tuple[str, ...] = ()
        if line and self.job.takes_batch_statistics(self.plan.model):
            units, joined = self.profile.graph.units, self.job.joins_statistics
            taking = [stage for stage in self.plan.stages if any(units[unit].batch_norms for unit in stage.units)]
            sizes = [span.size for stage in taking for span in statistics_spans(stage, joined=joined)]
            statistics = (f"B{line[1:]}; under this plan they are of {min(sizes)} to {max(sizes)} samples",)
        samples = about_samples(self.plan, self.profile.graph)
        keepers = about_keepers(self.plan, self.profile, self.job.optimizer_state, self._losses)
        return (*weights, *left_out, *statistics, *samples, *keepers)


Grouping = Callable[[TrainJob, ModelSpec], TrainJob]


class ReadPlan(TypedDict):
    """What is to run, what is said of it, and the profile that it was made from, with its path."""

    plan: Plan
    report: PlanReport
    profile: Profile
    profile_path: str


_MAX_SHOWN = 120
"""Characters of a value in a message: a transformers configuration has kilobytes."""


def new_run(
    plan_path: Path,
    job: TrainJob,
    out: Path,
    *,
    functions: Sequence[str],
    schedule: str | None = None,
    from_scratch: bool = False,
    grouping: Grouping | None = None,
) -> TrainRequest:
    """Read a plan and its profile, and look at the weights to begin with.

    Args:
        plan_path: the plan's file.
        job: how to train.
        out: where the run writes.
        functions: of the user's, as `FILE.py:FUNCTION`, that may be called if the plan names them.
        schedule: to train in; None: the plan's own.
        from_scratch: whether weights in the folder of the model are left.
        grouping: puts parameters into groups with options of their own.

    Raises:
        PlanError, ProfileError: a file is missing or foreign, or the plan cannot run.
        ConfigError: the plan names a function that is not among those that may be called; or as `first_weights`.
    """
    read = _read_plan(plan_path, functions)
    plan = read["plan"]
    own = plan_files.under_schedule(plan, schedule)
    if own is not plan:
        read = {**read, "plan": own, "report": replace(read["report"], prediction=None)}
    if grouping is not None:
        job = grouping(job, plan.model)
    return TrainRequest(**read, job=job, out=out, weights=first_weights(plan.model, from_scratch=from_scratch))


def resumed_run(
    run: Path,
    steps: int,
    out: Path,
    *,
    functions: Sequence[str],
    plan_path: Path | None = None,
    job: TrainJob | None = None,
) -> TrainRequest:
    """Read what an earlier run left, to go on to `steps` in all: under its own plan, or under another one.

    Args:
        run: folder of the run.
        steps: in all, those done included.
        out: where the run that goes on writes.
        functions: of the user's, as `FILE.py:FUNCTION`, that may be called if the plan names them.
        plan_path: of another plan for the same model: other cuts, degrees, shares, devices, also another global batch.
        job: of a run that has none of its own yet: what `spantrain import` made.

    Raises:
        ConfigError: there is no checkpoint, or it has as many steps already, or is of another model; or the plan names
            a function that is not among those that may be called.
        PlanError, ProfileError: a file is missing or foreign, or the plan cannot run.
    """
    folder = latest_checkpoint(run)
    manifest = read_manifest(folder)
    if steps <= manifest.step:
        raise ConfigError(f"{run} has {manifest.step} steps done; --steps is the number in all, give more than that")
    job = manifest.job or job
    assert job is not None, "a run that has no job of its own is given one"
    return TrainRequest(
        **what_to_run(run, manifest, plan_path, functions),
        job=replace(job, steps=steps),
        out=out,
        resume=Resume.of(folder, manifest),
        calm_plan=None if plan_path is not None else manifest.calm_plan,
    )


def has_own_job(run: Path) -> bool:
    """Whether a run has a job and a plan of its own to go on with; what `spantrain import` made has none.

    Raises:
        ConfigError: there is no checkpoint.
    """
    return read_manifest(latest_checkpoint(run), check_files=False).job is not None


def what_to_run(run: Path, manifest: Manifest, plan_path: Path | None, functions: Sequence[str]) -> ReadPlan:
    """Return the plan that goes on, what is said of it, its profile, and where that lies.

    Raises:
        ConfigError, PlanError, ProfileError: as `resumed_run`.
    """
    if plan_path is not None:
        found = _read_plan(plan_path, functions)
        if manifest.model.dataset == EXTERNAL:  # whatever the plan was made on: batches are given again
            found["plan"] = replace(found["plan"], model=replace(found["plan"].model, dataset=EXTERNAL))
        _check_same_model(run, manifest, found["plan"], plan_path)
        return found
    if manifest.plan is None:
        raise ConfigError(f"{run} was imported and has no plan yet; make one for its model, and give it with --plan")
    if not manifest.profile:
        raise ConfigError(f"{run}: its checkpoint names no profile; give a plan of its model with --plan")
    path = Path(manifest.profile)
    # A plan that took over in mid-run names none.
    profile = profile_at(path, manifest.plan, str(run)) if manifest.plan.profile else read_profile(path)
    plan_files.check_fits_profile(manifest.plan, profile, where=f"{run}: ")
    plan = _runnable(manifest.plan, functions)
    return {"plan": plan, "report": manifest.report, "profile": profile, "profile_path": manifest.profile}


def _check_same_model(run: Path, manifest: Manifest, plan: Plan, plan_path: Path) -> None:
    """Check that a plan is for the model of a checkpoint, and once samples were consumed, for the same data."""
    data = () if manifest.step == 0 else ("dataset", "sequence_length", "tokenizer", "chat", "objective", "rows")
    names = ("family", "source_sha256", *data)
    wrong = [
        f"{name}: {shortened(repr(before), _MAX_SHOWN)} there, {shortened(repr(now), _MAX_SHOWN)} in the plan"
        for name, before, now in plan_files.differences(manifest.model, plan.model, names, but=(DROPOUT,))
    ]
    if wrong:
        raise ConfigError(
            f"{plan_path} is not for the model that {run} has a checkpoint of ({'; '.join(wrong)}); plan for "
            f"{manifest.model.name} as it was trained; to go on with other data, export the run and import it"
        )


def _read_plan(plan_path: Path, functions: Sequence[str]) -> ReadPlan:
    plan, profile = plan_files.open_plan(plan_path)
    path = str(profile_path_of(plan, plan_path).resolve())
    report = read_plan_report(plan_path)
    return {"plan": _runnable(plan, functions), "report": report, "profile": profile, "profile_path": path}


def _runnable(plan: Plan, functions: Sequence[str]) -> Plan:
    """Return a plan that can be trained, with these functions in the place of those that it names."""
    if plan.outer is not None:
        raise PlanError(
            f"this plan joins {', '.join(group.name for group in plan.outer.groups)} by an outer optimizer: each "
            "of them trains its own plan, plan.GROUP.json beside it, as a cluster (docs/outer.md): "
            "spantrain outer run outer.yaml --cluster GROUP -- spantrain train plan.GROUP.json; or plan again without "
            "--allow-outer"
        )
    problems = check_limits(plan)
    if problems:
        raise PlanError("the plan would stop in the middle of a step:\n" + "\n".join(f"  {p}" for p in problems))
    if refusal := joint_refusal(plan):
        raise PlanError(f"this plan is for comparison by simulation only, it cannot be trained: {refusal}")
    return replace(plan, model=with_own_functions(plan.model, functions))


def check_divided(plan: Plan, job: TrainJob) -> None:
    """Refuse plans that divide tensors, or their updates, where the optimizer needs them whole.

    Raises:
        PlanError: it does.
    """
    refusal = division_refusal(job.optimizer)
    divided = [one.devices for stage in plan.stages for one in stage.replicas if len(one.devices) > 1]
    if refusal and divided:
        raise PlanError(
            f"{refusal}; {', '.join(divided[0])} of this plan do: plan again with --tensor-parallel none, or take "
            "another optimizer"
        )
    rows = [stage.devices for stage in plan.stages if stage.divides_state]
    if refusal and rows:
        raise PlanError(
            f"optimizer {job.optimizer} needs whole parameters, and {', '.join(rows[0])} of this plan update rows of "
            "them each (state_sharding): plan again without divided state, or take another optimizer"
        )
