"""What both ways in share: which model, on which data, on which devices, under which plan."""

import datetime
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spantrain.app.outer.join import outer_cluster
from spantrain.app.planning.protection import losses_of
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session
from spantrain.app.training.requests import Grouping, RunOptions, TrainRequest, new_run, resumed_run
from spantrain.app.training.run_folder import refuse_run, remove_old_run
from spantrain.app.training.trackers import chosen_trackers
from spantrain.app.training.train_from_scratch import ScratchRequest, describe, prepare, run_folder_for
from spantrain.config.cluster_file import PRESET_NAMES, load_cluster, load_preset, parse_cluster
from spantrain.core.cluster import Cluster
from spantrain.core.units import ChatForm, ModelSpec
from spantrain.core.update.optimizers import optimizer_fields, optimizer_problems
from spantrain.errors import ConfigError, PlanError
from spantrain.library.arguments import TrainingArguments
from spantrain.models.data.choice import model_on_data, user_functions, with_loss, without_dropout
from spantrain.models.parameter_groups import with_groups
from spantrain.models.sources import DROPOUT
from spantrain.models.tracing.factory import load_function
from spantrain.runtime.coordinator.batches import EXTERNAL


def function_source(function: str | Callable[..., Any], what: str) -> str:
    """Return `FILE.py:FUNCTION` of a function; text stays as it is.

    Functions are not sent to workers: each imports the file, under another name than `__main__`.

    Args:
        function: the function, or text.
        what: it is wanted for, for the message.

    Raises:
        ConfigError: it cannot be imported: a lambda, a method, a function inside another, one typed in by hand.
    """
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        saved = "; or save it, with save_pretrained('FOLDER'), and give 'hf:FOLDER', which has its weights"
        given, wanted = (name, "it") if name else (f"an object, a {type(function).__name__},", "a function for it")
        raise ConfigError(
            f"{what}: {given} cannot be imported by workers; define {wanted} with `def` at the top of a file (no "
            "lambda, no method, not inside another function), or give 'FILE.py:FUNCTION'"
            f"{saved if hasattr(function, 'save_pretrained') else ''}"
        )
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"{what}: {name} is not in a file, so workers cannot import it; save it to FILE.py and give it from there, "
            f"or give 'FILE.py:{name}'"
        )
    if getattr(inspect.getmodule(function), name, None) is not function:
        raise ConfigError(f"{what}: {name} of {file} is another object than this one: a decorator has replaced it")
    return f"{Path(file).resolve()}:{name}"


ModelFactory = str | Callable[..., Any]
"""A function that returns `(module, example_batch)` or `(module, example_batch, loss)`; or the name of a model."""

_OTHER_FOLDER = (
    "go on with it (resume_from_checkpoint=True in TrainingArguments), name another output_dir, or remove the old "
    "run (overwrite_output_dir=True)"
)
_BY_DEVICE = ("foreach", "fused", "maximize", "capturable", "differentiable")
_THIS_MACHINE = """\
name: this-machine
sites:
  - name: here
    network: {{bandwidth: 10 Gbit/s, latency: 0.05 ms}}
    hosts:
      - {{name: here, devices: {{cpu: {count}}}}}
"""


class Setting:
    """A run that is yet to be begun."""

    def __init__(
        self,
        model: ModelSpec,
        arguments: TrainingArguments,
        *,
        cluster: Cluster | str | Path | None,
        plan: str | Path | None,
        optimizer: object,
        measure: bool,
    ) -> None:
        """Put together what the user gave; `measure`: the cluster before planning, instead of taking it by data sheets.

        Raises:
            ConfigError: there is no such cluster, or the optimizer is none that is known here.
        """
        if not arguments.output_dir:
            arguments = replace(arguments, output_dir=run_folder_for(model.name, datetime.datetime.now()))
        self.optimizer: Mapping[str, Any] = given_optimizer(optimizer)
        """Fields of the job that the optimizer says."""
        self.model = without_dropout(model) if arguments.dropout == "off" else model
        if arguments.torch_compile:
            self.model = replace(self.model, compiled=True)
        arguments.job(1, self.optimizer)  # numbers that make no sense are refused before anything is started
        self.arguments, self.cluster, self.measure = arguments, _cluster(cluster), measure
        self.plan = None if plan is None else Path(plan)

    @property
    def out(self) -> Path:
        """The run's folder."""
        return Path(self.arguments.output_dir)

    def take_folder(self) -> None:
        """Make sure that the folder holds no other run than the one that goes on, or remove it if that is wanted.

        Raises:
            ConfigError: it holds one.
        """
        resume = self.arguments.resume_from_checkpoint
        if resume is True or (resume and Path(resume).resolve() == self.out.resolve()):
            return
        if self.arguments.overwrite_output_dir:
            remove_old_run(self.out, keep=self.plan)
        refuse_run(self.out, _OTHER_FOLDER)

    def ready(self, steps: int, listener: Reporter) -> TrainRequest | None:
        """Return what is to be trained, if no devices must be asked first: a plan, or an earlier run to go on with.

        Raises:
            PlanError: the plan is of another model.
            ConfigError: the earlier run was trained on other data.
        """
        resume, functions = self.arguments.resume_from_checkpoint, user_functions(self.model)
        if resume:
            run = self.out if resume is True else Path(resume)
            request = resumed_run(run, steps, self.out, functions=functions, plan_path=self.plan)
            if request.plan.model.dataset not in (self.model.dataset, EXTERNAL):
                raise ConfigError(
                    f"{run} was trained on {request.plan.model.dataset}, which is not {self.model.dataset}: give the "
                    "same data; to go on with other data, export the run and import it"
                )
            return self._kept(request)
        if self.plan is not None and self.arguments.gradient_checkpointing is not None:
            raise ConfigError("gradient_checkpointing: the plan says what is computed again; leave it out")
        if self.plan is None:
            return None if self.measure else self._kept(describe(self._request(steps), listener))
        job, scratch = self.arguments.job(steps, self.optimizer), self.arguments.from_scratch
        new = new_run(self.plan, job, self.out, functions=functions, from_scratch=scratch, grouping=self._grouping())
        return self._kept(new)

    def planned(self, session: Session, steps: int, listener: Reporter) -> TrainRequest:
        """Measure and plan; return what is to be trained."""
        return self._kept(prepare(session, self._request(steps), listener))

    def _grouping(self) -> Grouping | None:
        """Return what puts parameters into groups; None: all are in one."""
        rule = self.arguments.parameter_groups
        decays = self.optimizer.get("weight_decay", self.arguments.weight_decay)
        if not rule:
            rule = "all" if self.optimizer or not decays else "norms"
        if rule == "all":
            return None
        if rule == "norms":
            return with_groups
        function = load_function(rule, what="parameter_groups") if isinstance(rule, str) else rule
        return functools.partial(with_groups, rule=function)

    def _request(self, steps: int) -> ScratchRequest:
        return ScratchRequest(
            cluster=self.cluster,
            model=self.model,
            job=self.arguments.job(steps, self.optimizer),
            out=self.out,
            global_batch=self.arguments.train_batch_size,
            dtype=self.arguments.dtype,
            recompute=self.arguments.gradient_checkpointing,
            grouping=self._grouping(),
            from_scratch=self.arguments.from_scratch,
        )

    def _kept(self, request: TrainRequest) -> TrainRequest:
        """Return the request on this setting's data, with checkpoints and scalars where the arguments say.

        Under `spantrain outer run` it is one cluster of an outer optimizer.
        """
        found = request.plan.model
        if found.compiled != self.model.compiled:
            raise PlanError(
                f"torch_compile {self.model.compiled}: the plan was made for {found.compiled}; say that, or plan again"
            )
        if _identity(found) != _identity(self.model):
            if _identity(without_dropout(found)) == _identity(without_dropout(self.model)):
                was = found.config.get(DROPOUT, "on")
                raise PlanError(
                    f"dropout {self.arguments.dropout}: the plan was made for {was}; say that, or plan again"
                )
            raise PlanError(
                f"the plan is of model {found.name}, which is not {self.model.name} as it is now: plan again, or give "
                "the model that it was made for"
            )
        return replace(
            request,
            plan=replace(request.plan, model=self.model),
            options=RunOptions(
                keep_checkpoints=self.arguments.save_total_limit,
                gather=self.arguments.gather,
                report_to=chosen_trackers(self.arguments.report_to),
                run_name=self.arguments.run_name,
                project=self.arguments.project,
                logging_steps=self.arguments.logging_steps,
                protect=losses_of(self.arguments.protect),
                outer=outer_cluster(),
            ),
        )


def saved_model(model: object, arguments: TrainingArguments) -> tuple[Any, TrainingArguments]:
    """Return a model of the transformers library as `hf:FOLDER`, written to the run's folder, which is named then.

    Anything else is returned as it is.

    Raises:
        ConfigError: it has adapters of peft, or the folder holds another run.
    """
    kind = type(model)
    if kind.__module__.startswith("peft."):
        raise ConfigError(
            f"model: a {kind.__name__} has adapters, which each device makes by itself: give the model that is "
            "adapted, and peft_config=LoraConfig(...)"
        )
    save: Callable[[Path], object] | None = getattr(model, "save_pretrained", None)
    if save is None or not kind.__module__.startswith("transformers."):
        return model, arguments
    out = Path(arguments.output_dir or run_folder_for(kind.__name__, datetime.datetime.now()))
    folder, resumes = out / "given", bool(arguments.resume_from_checkpoint)
    if not resumes and not arguments.overwrite_output_dir:
        refuse_run(out, _OTHER_FOLDER)
    if not (resumes and folder.exists()):
        for before in folder.glob("*.safetensors"):  # of a model in more files
            before.unlink()
        save(folder)
    return f"hf:{folder}", replace(arguments, output_dir=out)


def model_of(
    factory: ModelFactory,
    loss: ModelFactory | None,
    *,
    data: str | None,
    tokenizer: str | Path | None,
    sequence_length: int | None,
    chat: ChatForm | None = None,
    sample: object = None,
) -> ModelSpec:
    """Return the model that a user gave, on data that is given by name, or of which a sample is.

    Raises:
        ConfigError: a function cannot be imported by workers, or model, data and tokenizer do not fit.
    """
    if sequence_length is not None and type(sequence_length) is not int:
        raise ConfigError(f"sequence_length must be a whole number, got {sequence_length!r}")
    if not isinstance(tokenizer, str | Path | None):
        raise ConfigError(f"tokenizer: a {type(tokenizer).__name__} is no file or folder; give it as processing_class")
    spec = model_on_data(
        function_source(factory, "model"),
        data=data,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        sequence_length=sequence_length,
        chat=chat,
        sample=sample,
    )
    return spec if loss is None else with_loss(spec, function_source(loss, "loss_fn"))


def _identity(spec: ModelSpec) -> tuple[object, ...]:
    """Return what makes a model the same, wherever its file lies and whatever it is trained on."""
    own = {name: value for name, value in spec.config.items() if name != "loss"}
    function = spec.source.rpartition(":")[2] if spec.family == "factory" else ""
    return spec.family, own, spec.source_sha256, function, spec.sequence_length, spec.rows


def given_optimizer(optimizer: object) -> dict[str, Any]:
    """Return the fields of a job that an optimizer says: a name, a class of torch's, or a `partial` of one.

    Raises:
        ConfigError: it is something else, or has an argument that is not known here.

    >>> given_optimizer("sgd")
    {'optimizer': 'sgd'}
    """
    if optimizer is None:
        return {}
    given: Mapping[str, Any] = {}
    made: object = optimizer
    if isinstance(optimizer, functools.partial) and not optimizer.args:
        made, given = optimizer.func, optimizer.keywords
    name = made.lower() if isinstance(made, str) else _name_of_class(made)
    by_device = [key for key in given if key in _BY_DEVICE]
    try:
        if by_device:
            raise ValueError(f"{', '.join(by_device)}: each device chooses that; leave it out")
        fields = optimizer_fields(name, given)
        if problems := list(optimizer_problems(name, fields.get("optimizer_options", {}))):
            raise ValueError("; ".join(problems))
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from None
    return fields


def _name_of_class(made: object) -> str:
    if isinstance(made, type) and made.__module__.startswith("torch.optim"):
        return made.__name__.lower()
    name = getattr(made, "__qualname__", type(made).__name__)
    raise ConfigError(
        f"optimizer: {name} is none of torch's classes; give one of them, such as torch.optim.AdamW, its name, or "
        "functools.partial(torch.optim.AdamW, lr=...): each device makes its own"
    )


def _cluster(given: Cluster | str | Path | None) -> Cluster:
    """Return a cluster: as it is, a preset, a file, or this machine's processor, twice if it has the cores."""
    if isinstance(given, Cluster):
        return given
    if given is None:
        return parse_cluster(_THIS_MACHINE.format(count=min(2, os.cpu_count() or 1)), source="this machine")
    if str(given).replace("-", "") in {name.replace("-", "") for name in PRESET_NAMES}:
        return load_preset(str(given))
    if not Path(given).exists():
        raise ConfigError(f"cluster: {given} is neither a file nor one of the presets {', '.join(PRESET_NAMES)}")
    return load_cluster(Path(given))
