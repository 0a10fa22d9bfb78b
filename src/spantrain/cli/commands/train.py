"""`spantrain train`: a new run of a plan, or going on where an earlier one stopped."""

import contextlib
import datetime
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from spantrain.cli import options as shared
from spantrain.cli.commands.train_options import JOB_OPTIONS, TrainArguments
from spantrain.cli.failure import graceful_interrupt
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import check_can_make, is_file
from spantrain.core.job import TrainJob
from spantrain.core.names import few
from spantrain.errors import ConfigError, Interrupted, PeerLostError, PlanError, WorkerError
from spantrain.models.data.choice import user_functions
from spantrain.schedule.registry import check_schedule

if TYPE_CHECKING:
    from spantrain.app.launch.way import LaunchWay
    from spantrain.app.reporter import Reporter
    from spantrain.app.training.outcome import TrainOutcome
    from spantrain.app.training.requests import Grouping, RunOptions, TrainRequest
    from spantrain.app.training.stop import StopRequest
    from spantrain.app.training.train_from_scratch import ScratchRequest
    from spantrain.core.units import ModelSpec

_FILES = (
    "plan.json", "profile.json", "run.json", "trace.json", "decisions.jsonl", "switches.jsonl", "metrics.jsonl",
    "view.json",
)  # fmt: skip
_MODEL_OPTIONS = (
    "preset", "cluster", *(one.name for one in fields(shared.ModelOptions)), "global_batch", "dtype", "emulated_speed",
    "gradient_checkpointing",
)  # fmt: skip
"""Options that go with --model: a plan and a checkpoint say all this already."""
_WHERE_OPTIONS = (
    "other_plan", "keep_checkpoints", "gather", "standby_coordinator", "report_to", "no_network", "network_trace",
    "listen", "relay", "lost_after", "on_loss", "protect", "insecure", "page", "page_listen",
)  # fmt: skip
"""Options that a run that goes on needs again: no checkpoint has them."""


@shared.with_options(TrainArguments)
def train(asked: TrainArguments, context: typer.Context) -> None:
    """Train what a plan says, or go on where an earlier run stopped; under `spantrain outer run` as a cluster of it."""
    _Command(asked, shared.given_options(context), shared.launch_way(context)).run()


class _Command:
    def __init__(self, asked: TrainArguments, given: Mapping[str, str], launch: "LaunchWay | None") -> None:
        """Take the options, and those that stand on the command line: the word of each, by name."""
        self._asked = asked
        self._given = given
        self._launch = launch

    def run(self) -> None:
        asked = self._asked
        self._check_words()
        where = asked.session(self._launch, lost_after=asked.lost_after)
        options = self._run_options()
        work: partial[tuple[TrainOutcome, TrainRequest]]
        if asked.model is not None:
            scratch = replace(self._scratch_request(asked.model), options=options)
            from spantrain.app.training.train_from_scratch import train_from_scratch

            out, work = scratch.out, partial(train_from_scratch, scratch, where)
        else:
            request = replace(self._request(), options=options)
            from spantrain.app.training.run_folder import remove_old_run
            from spantrain.app.training.train_from_scratch import train_request

            out, work = request.out, partial(train_request, request, where)
            if asked.overwrite:
                remove_old_run(out, keep=asked.plan_path)
        self._carry_out(out, work)

    def _carry_out(self, out: Path, work: "partial[tuple[TrainOutcome, TrainRequest]]") -> None:
        """Train, and show how it goes, what came of it, and how to go on."""
        from spantrain.cli.render.render import TerminalReporter

        with self._going_on(out) as stop, TerminalReporter(tables=not self._asked.json_) as reporter:
            with self._page(out, reporter):
                outcome, trained = work(stop, reporter)
            reporter.show_training(outcome, trained.plan, trained.report)
        if self._asked.json_:
            shared.print_json(to_json(outcome))
        if outcome.interrupted:
            command = self._command_to_resume(*_run_and_model(Path(outcome.checkpoint)))
            raise Interrupted(f"{outcome.steps} steps done; checkpoint: {outcome.checkpoint}; go on with: {command}")

    def _run_options(self) -> "RunOptions":
        from spantrain.app.faults import read_faults
        from spantrain.app.outer.join import outer_cluster
        from spantrain.app.planning.protection import losses_of
        from spantrain.app.training.requests import RunOptions
        from spantrain.app.training.trackers import chosen_trackers

        asked = self._asked
        return RunOptions(
            keep_checkpoints=asked.keep_checkpoints,
            gather=asked.gather,
            standby_coordinator=asked.standby_coordinator,
            report_to=chosen_trackers(asked.report_to or ()),
            network_trace=shared.chosen_trace(
                asked.network_trace, emulated=not asked.no_network and asked.listen is None
            ),
            outer=outer_cluster(),
            on_loss=asked.on_loss,
            protect=losses_of(asked.protect),
            faults=() if asked.faults is None else read_faults(asked.faults),
        )

    def _check_words(self) -> None:
        """Refuse options that do not go together, and folders that cannot be written to or hold another run."""
        from spantrain.app.training.run_folder import check_not_under_way, refuse_run

        asked = self._asked
        if sum(one is not None for one in (asked.plan_path, asked.model, asked.resume)) != 1:
            raise ConfigError("give a plan file, or --model NAME with --preset or --cluster, or --resume RUN")
        if asked.listen is None:
            why = "belongs to --listen; workers that are started here end with this machine"
            self._refuse(("standby_coordinator",), why)
        if not asked.page:
            self._refuse(("page_listen",), "belongs to --page; give that, too")
        folder = asked.out or asked.resume
        if folder is not None:
            option = "--out" if asked.out else "--resume"
            check_can_make(folder, option, files=_FILES, folders=("checkpoint", "logs"))
            check_not_under_way(folder)
        if asked.resume is None:
            self._refuse(("other_plan",), "belongs to --resume; a new run takes the plan's file alone")
        else:
            self._refuse(("from_scratch",), "a resumed run has the weights of its checkpoint; leave it out")
        out, resume = asked.out, asked.resume
        goes_on = out is None or (resume is not None and out.resolve() == resume.resolve())
        if asked.overwrite and goes_on:
            raise ConfigError("--overwrite: belongs to --out with a folder that holds another run; leave it out")
        if out is not None and not goes_on and not asked.overwrite:
            ways = f"go on with it by --resume {out}, name another --out, or remove the old run by --overwrite"
            refuse_run(out, ways)
        if asked.model is not None:
            self._refuse(("function",), "--model, --data and the model's own loss are called without it; leave it out")
        else:
            self._refuse(_MODEL_OPTIONS, "a plan and a checkpoint say this already; leave it out, or give --model")

    def _refuse(self, names: Sequence[str], why: str) -> None:
        found = [self._given[name] for name in names if name in self._given]
        if found:
            raise ConfigError(f"{', '.join(found)}: {why}")

    def _request(self) -> "TrainRequest":
        """Return what a plan, or an earlier run, says is to be trained."""
        from spantrain.app.training.recovery.journal import adopted_run
        from spantrain.app.training.requests import has_own_job, new_run, resumed_run

        asked = self._asked
        if asked.resume is None:
            assert asked.plan_path is not None, "one of plan, model and run is given"
            if asked.out is None and not is_file(asked.plan_path):
                raise PlanError(f"{asked.plan_path}: there is no such file; make a plan with `spantrain plan`")
            if asked.out is None:
                raise ConfigError("give --out FOLDER for the run's checkpoint, trace and logs")
            functions = shared.chosen_functions(asked.function)
            return new_run(
                asked.plan_path,
                self._job(),
                asked.out,
                functions=functions,
                schedule=asked.schedule,
                from_scratch=asked.from_scratch,
                grouping=self._grouping(),
            )
        functions, job = shared.chosen_functions(asked.function), None
        adopted = None
        if asked.listen is not None and asked.out in (None, asked.resume) and asked.other_plan is None:
            adopted = adopted_run(asked.resume, asked.steps, functions=functions)
        if adopted is not None or has_own_job(asked.resume):
            why = "a resumed run has these from its checkpoint; leave them out, or start a new run"
            self._refuse(("schedule", *JOB_OPTIONS), why)
        else:
            job = self._job()
        if adopted is not None:
            return adopted
        out = asked.out or asked.resume
        return resumed_run(asked.resume, asked.steps, out, functions=functions, plan_path=asked.other_plan, job=job)

    def _job(self) -> TrainJob:
        return self._asked.job(adapter_given="adapter" in self._given)

    def _grouping(self) -> "Grouping | None":
        if not self._asked.no_decay_on_norms:
            return None
        from spantrain.models.parameter_groups import with_groups

        return with_groups

    def _scratch_request(self, model: str) -> "ScratchRequest":
        asked = self._asked
        cluster = asked.chosen_cluster()
        standby = asked.standby_coordinator
        if standby and standby not in cluster.device_by_name:
            raise ConfigError(f"--standby-coordinator {standby}: give one of {few(tuple(cluster.device_by_name))}")
        spec = asked.chosen_model(model, read=False)
        job = self._job()
        schedule = check_schedule(asked.schedule or "critical-path")
        from spantrain.app.training.train_from_scratch import ScratchRequest, run_folder_for

        return ScratchRequest(
            cluster=cluster, own_speed=asked.emulated_speed is not None, model=spec, job=job,
            out=asked.out or run_folder_for(spec.name, datetime.datetime.now()), global_batch=asked.global_batch,
            dtype=asked.dtype, schedule=schedule, recompute=asked.gradient_checkpointing, grouping=self._grouping(),
            from_scratch=asked.from_scratch, overwrite=asked.overwrite,
        )  # fmt: skip

    @contextmanager
    def _going_on(self, out: Path) -> Iterator["StopRequest"]:
        """Say from where to go on, if a run is interrupted or lost."""
        from spantrain.app.training.stop import StopRequest

        stop = StopRequest()
        try:
            with graceful_interrupt(stop.ask, lambda: self._where_to_go_on(out)):
                yield stop
        except (PeerLostError, WorkerError) as error:
            if not stop.begun:
                raise
            raise type(error)(f"{error}\n{self._where_to_go_on(out)}") from None

    @contextmanager
    def _page(self, out: Path, reporter: "Reporter") -> Iterator[None]:
        """Serve the run's page, if that is asked for."""
        if not self._asked.page:
            yield
            return
        from spantrain.app.watching.serve import page_of

        with page_of(out, self._asked.page_listen, "--page-listen") as shown:
            reporter.note(f"The run's page: {shown.url}{shown.warning}")
            yield

    def _where_to_go_on(self, out: Path) -> str:
        from spantrain.app.training.recovery.journal import held_run
        from spantrain.runtime.checkpoint.manifest import latest_checkpoint

        with contextlib.suppress(ConfigError):
            if held := held_run(out):
                command = self._command_to_resume(out, held.model)
                return (
                    f"workers that live keep what they hold after step {held.step} for ten minutes (--keep); go on "
                    f"with that, or from the newest checkpoint: {command}"
                )
        for folder in (out, self._asked.resume):
            with contextlib.suppress(ConfigError):
                if folder is not None:
                    found = latest_checkpoint(folder)
                    command = self._command_to_resume(
                        *_run_and_model(found), *(("--out", str(out)) if folder != out else ())
                    )
                    return f"the newest complete checkpoint is {found}; go on with: {command}"
        return "there is no checkpoint to go on from; --checkpoint-every N writes them"

    def _command_to_resume(self, folder: Path, model: "ModelSpec", *more: str) -> str:
        """Return the command that goes on in the same way with a run in a folder."""
        words = [*self._launch.command, "--"] if self._launch else ["spantrain"]
        words += ["train", "--resume", str(folder), *more, "--steps", str(self._asked.steps)]
        for name in user_functions(model):
            words += ["--function", name]
        listens = {"listen"} if self._launch and (self._asked.listen or "").endswith(":0") else set()  # on any ports
        return shlex.join([*words, *shared.words_of(self._asked, self._given, {*_WHERE_OPTIONS} - listens)])


def _run_and_model(checkpoint: Path) -> "tuple[Path, ModelSpec]":
    """Return the run's folder of a checkpoint, and its model."""
    from spantrain.runtime.checkpoint.manifest import read_manifest

    return checkpoint.parent.parent, read_manifest(checkpoint, check_files=False).model
