"""A trainer for people who have a model, a loss, data and an optimizer; the rest is found out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.metrics import EvaluationMetrics
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.run_folder import alone_in
from spantrain.app.training.step_loop import StepLoop
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.app.weight_folder import first_weights
from spantrain.app.weights import export_run, trained_model
from spantrain.config.files.text_files import check_can_make
from spantrain.core.cluster import Cluster
from spantrain.core.units import ChatForm, ModelSpec
from spantrain.errors import ConfigError, UsageError
from spantrain.library import evaluation
from spantrain.library.arguments import TrainingArguments
from spantrain.library.callbacks import TrainerState, UserReporter, checked_callbacks
from spantrain.library.setting import ModelFactory, Setting, function_source, model_of, saved_model
from spantrain.library.streaming import Dealer, Shuffled, Streamed, is_stream, rows_here
from spantrain.models.adapters import LoraForm, with_lora
from spantrain.models.build import unit_names
from spantrain.models.data.chat import ChatSamples
from spantrain.models.data.choice import user_functions, with_own_functions
from spantrain.models.data.dataset import Dataset, open_dataset
from spantrain.models.tracing.factory import check_not_importing
from spantrain.models.tracing.model import as_given
from spantrain.runtime.checkpoint.manifest import final_checkpoint, read_manifest

if TYPE_CHECKING:
    import torch

__all__ = ["Trainer"]

_LOOKED_AT = 8
"""Samples of a data set."""


def state_of(folder: Path, model: ModelSpec) -> "dict[str, torch.Tensor]":
    """Return what the unsplit model's `load_state_dict` takes; of buffers, running statistics are the trained ones.

    Raises:
        ConfigError: it is no complete checkpoint, or a file is damaged, or lies on another machine; or it is of a model
            from another function than `model`.
    """
    manifest = read_manifest(folder)
    own = with_own_functions(manifest.model, user_functions(model))
    whole, _ = trained_model(folder, replace(manifest, model=own))
    return whole.module.state_dict()


class Trainer:
    """Trains a model on all devices of a cluster, or on what a plan says.

    The model is a function in a file, since each worker builds its part by itself; so are data, unless they are a text
    that names them (docs/data.md) or a data set in this process, whose samples are then sent to the workers that read
    them. Without data, a factory's example batch is taken again and again.

    `state` is what callbacks see of the last run.
    """

    def __init__(
        self,
        model: ModelFactory,
        loss_fn: ModelFactory | None = None,
        data: object = None,
        optimizer: object = None,
        plan: str | Path | None = None,
        *,
        args: TrainingArguments | None = None,
        cluster: Cluster | str | Path | None = None,
        callbacks: Sequence[object] = (),
        tokenizer: str | Path | None = None,
        sequence_length: int | None = None,
        chat: ChatForm | None = None,
        measure: bool = True,
        workers: SessionOptions | None = None,
        **parts: Unpack[evaluation.TrainerParts],
    ) -> None:
        """Put together what is to be trained; nothing is started yet.

        Args:
            model: a function (docs/library.md); `FILE.py:FUNCTION`; `hf:FOLDER`; one of transformers'; a name.
            loss_fn: a function of outputs and labels: each sample's loss, or their mean.
            data: a text that names data, a function that returns a data set, a data set, or a stream.
            optimizer: `adamw`, `sgd`, a class of torch's, or a `functools.partial` of one.
            plan: a plan's file; None: measure the cluster, and plan.
            args: how to train.
            cluster: a preset's name, a file, or None: the processor of this machine. A plan has its own.
            callbacks: are told of steps, evaluations, checkpoints and the end.
            tokenizer: file or folder, for models that read text.
            sequence_length: tokens of a sample, where data do not say.
            chat: how conversations become samples; None: answers, padded, by the tokenizer's own template.
            measure: measure devices and network before planning; False: plan at once, by data sheets.
            workers: where the workers run, if not all on this machine.
            parts: by the transformers library's names (`TrainerParts`).

        Raises:
            ConfigError: a function cannot be imported by workers, or what is given does not fit together.
        """
        self._parts, self._stop, self.state = evaluation.checked_parts(parts), StopRequest(), TrainerState()
        self._rows = rows_here(data)
        named, given = saved_model(model, args or TrainingArguments())
        spec = model_of(
            named, loss_fn, data=_name_of(data) if self._rows is None else None, tokenizer=tokenizer,
            sequence_length=sequence_length, chat=chat, sample=self._sample(named, sequence_length),
        )  # fmt: skip
        spec = with_lora(as_given(spec, model), LoraForm.of(self._parts.get("peft_config")))
        self._setting = Setting(spec, given, cluster=cluster, plan=plan, optimizer=optimizer, measure=measure)
        self._check_parts()
        self._callbacks, self._workers = checked_callbacks(callbacks), workers or SessionOptions()

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return self._setting.out

    @property
    def model(self) -> "torch.nn.Module":
        """The unsplit model with the run's weights, as `state_dict` has them; put together anew each time.

        Raises:
            ConfigError: as `evaluate`.
        """
        return self._whole_model().loaded.module

    def fit(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutcome:
        """Train to the end; return losses, and figures of devices and links.

        Args:
            resume_from_checkpoint: goes before that of `args`; None: that.

        Raises:
            UsageError: plan, profile, checkpoint or data are missing, or do not fit.
            WorkerError, PeerLostError: a device failed or was lost.
        """
        self._stop, setting = StopRequest(), self._setting
        if resume_from_checkpoint is not None:
            setting.arguments = replace(setting.arguments, resume_from_checkpoint=resume_from_checkpoint)
        dealer = None if self._rows is None else self._dealer()
        progress = UserReporter(self._callbacks, setting.arguments, stop=self.stop, save=self._stop.ask_save)
        steps = self._steps(dealer, progress)
        progress.state.max_steps = steps
        self.state = progress.state
        with progress, opened(setting, steps, self._workers, progress) as (session, request):
            request = replace(request, best=progress.best)
            if dealer is None:
                outcome = train(session, request, self._stop, progress)
            else:
                options = replace(request.options, dataset_size=dealer.size)
                outcome = self._fit_rows(session, replace(request, options=options), dealer, progress)
        progress.ended(outcome)
        return outcome

    train = fit

    def evaluate(self, eval_dataset: object = None) -> dict[str, float]:
        """Return `eval_loss`, what `compute_metrics` makes of outputs and labels, `eval_runtime` and the speed.

        The whole model is put together in this process, on a GPU if there is one here, with the weights of
        `state_dict`; none of the other devices is used.

        Args:
            eval_dataset: in this process; None: that of the trainer, or what is held out of the data.

        Raises:
            ConfigError: there is no checkpoint, nothing is held out, or the model is too large for this process.
        """
        return self._whole_model().run(self._held_out(eval_dataset), self._parts, prefix="eval", gather=False).metrics

    def predict(self, test_dataset: object) -> evaluation.PredictionOutput:
        """Return the outputs for a data set's samples, in order, with their labels and metrics, as `evaluate` does.

        Raises:
            ConfigError: as `evaluate`.
        """
        return self._whole_model().run(self._held_out(test_dataset), self._parts, prefix="test", gather=True)

    def save_model(self, folder: str | Path | None = None) -> Path:
        """Write the weights of `state_dict` to a new folder, as `spantrain export` does; return it.

        `processing_class` is saved there, too.

        Args:
            folder: None: `model` in the run's folder.

        Raises:
            ConfigError: the folder holds something, or as `state_dict`.
        """
        to = self.output_dir / "model" if folder is None else Path(folder)
        export_run(self.output_dir, to, functions=user_functions(self._setting.model))
        if "processing_class" in self._parts:
            self._parts["processing_class"].save_pretrained(to)
        return to

    def _sample(self, model: ModelFactory, sequence_length: int | None) -> object:
        """Return the first sample of data in this process, which says what of them a library's model reads."""
        if self._rows is None or not str(model).startswith("hf:"):
            return None
        ahead = self._rows
        if isinstance(ahead, Iterator):
            self._rows, ahead = tee(ahead)
        return evaluation.example_row(str(model), ahead, self._parts, sequence_length)

    def _check_parts(self) -> None:
        """Refuse parts that the way in which data come has no use for, and a best metric that nobody measures."""
        if self._rows is None and "data_collator" in self._parts:
            raise ConfigError(
                "data_collator: goes with a data set in this process; what workers read by themselves, by name or from "
                "a function, is collated there: leave it out, or give the data set itself"
            )
        if self._setting.arguments.evaluates and self._rows is not None:
            if "eval_dataset" not in self._parts:
                raise ConfigError(
                    "eval_steps: data in this process has no held-out part; give eval_dataset, or a function as data, "
                    "or leave it out"
                )
            evaluation.check_fits(self._setting.model)
        arguments, computes = self._setting.arguments, "compute_metrics" in self._parts
        metric = str(arguments.metric_for_best_model).removeprefix("eval_")
        own = ("loss",) if self._rows is None else ("loss", "runtime", "samples_per_second")
        if not arguments.evaluates or metric in own or (computes and self._rows is not None):
            return
        remedy = "give compute_metrics, which returns it"
        if self._rows is None:
            remedy = "devices evaluate the loss alone; give the data set itself as data, and eval_dataset"
        raise ConfigError(f"metric_for_best_model {metric}: nobody measures it while training: {remedy}; or name loss")

    def _whole_model(self) -> evaluation.WholeModel:
        evaluation.check_fits(self._setting.model)
        return evaluation.WholeModel.of(self._setting.model, self.state_dict())

    def _held_out(self, dataset: object) -> Dataset:
        model = self._setting.model
        given = self._parts.get("eval_dataset") if dataset is None else dataset
        if given is not None:
            return evaluation.rows_of(given, model, self._parts)
        if self._rows is not None:
            raise ConfigError("evaluate: data in this process has no held-out part; give eval_dataset, or a data set")
        return open_dataset(model, held_out=True)

    def _evaluated(self, steps_done: int) -> EvaluationMetrics:
        """Evaluate on `eval_dataset` in the middle of training, on the checkpoint that has just been written."""
        found = self.evaluate()
        if "eval_loss" not in found:
            raise ConfigError("eval_dataset: its samples have no labels; add them, under the key `labels`")
        return EvaluationMetrics(step=steps_done, eval_loss=found.pop("eval_loss"), more=found)

    def stop(self) -> None:
        """Have `fit` end after the step that is under way, with a checkpoint; from a callback or another thread."""
        self._stop.ask()

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """Return parameters and buffers by the names of the unsplit model.

        Of the newest checkpoint; when a run with `load_best_model_at_end` has ended, of the best.

        Raises:
            ConfigError: there is no checkpoint, or files of it lie on other machines.
        """
        return state_of(final_checkpoint(self.output_dir), self._setting.model)

    def _dealer(self) -> Dealer:
        model = self._setting.model
        if is_stream(self._rows):
            return Streamed(self._rows, model, self._parts)
        rows = evaluation.rows_of(self._rows, model, self._parts, trains=True)
        if "data_collator" not in self._parts:  # samples that make no batch are refused before anything is started
            first = range(min(len(rows), _LOOKED_AT))
            rows.inputs(first), rows.labels(first)
        return Shuffled(rows)

    def _steps(self, dealer: Dealer | None, progress: UserReporter) -> int:
        arguments = self._setting.arguments
        if arguments.max_steps > 0 and not self._setting.model.dataset.startswith("chat:"):
            return arguments.max_steps
        if dealer is not None and dealer.size is None:
            raise ConfigError("data: nobody knows how many samples a stream has, so epochs are none; give max_steps")
        data = open_dataset(self._setting.model) if dealer is None else None
        if isinstance(data, ChatSamples):
            progress.note(f"Data: {data.note}")
        size = len(data) if data is not None else dealer.size if dealer is not None else None
        return arguments.max_steps if arguments.max_steps > 0 else arguments.steps(size or 1)

    def _fit_rows(
        self, session: Session, request: TrainRequest, dealer: Dealer, progress: UserReporter
    ) -> TrainOutcome:
        """Train on samples that lie in this process, in the order in which workers would have read them."""
        job = request.job
        dealer.begin(request.plan.global_batch, job.order_seed, request.resume)
        every = job.evaluate_every
        if every:
            request = replace(request, last_evaluation=lambda: self._evaluated(job.steps))
        with StepLoop(session, request, progress) as loop:
            while loop.steps_done < job.steps and not self._stop.wanted:
                loop.step(*dealer.batch(loop.steps_done))
                evaluates = every and loop.steps_done % every == 0 and loop.steps_done < job.steps
                regular = job.checkpoint_every and loop.steps_done % job.checkpoint_every == 0
                if evaluates or regular or self._stop.take_save():
                    dealer.saved(Path(loop.save()))
                if evaluates:
                    loop.evaluated(self._evaluated(loop.steps_done))
            folder = loop.save()
            dealer.saved(Path(folder))
            outcome = loop.close()
        assert outcome is not None, "at least one step was done"
        return replace(outcome, interrupted=self._stop.wanted, checkpoint=folder)


@contextmanager
def opened(
    setting: Setting, steps: int, workers: SessionOptions, progress: UserReporter
) -> Iterator[tuple[Session, TrainRequest]]:
    """Bring workers up, and find out what they are to do; take them down at the end.

    Raises:
        UsageError: as `Setting.ready` and `Setting.planned`; or a file that is being imported gets here.
    """
    check_not_importing()
    check_can_make(setting.out, "output_dir")
    unit_names(setting.model)  # a model that cannot be had or cut is refused before anything is written or started
    setting.take_folder()
    ready = setting.ready(steps, progress)
    if ready is None:
        first_weights(setting.model, from_scratch=setting.arguments.from_scratch)
    cluster = ready.plan.cluster if ready else setting.cluster
    names = ready.plan.devices if ready else tuple(device.name for device in cluster.devices)
    options = replace(workers, functions=user_functions(setting.model))
    with alone_in(setting.out), open_session(cluster, names, options, setting.out / "logs", progress) as session:
        yield session, ready or setting.planned(session, steps, progress)


def _name_of(data: object) -> str | None:
    if data is None or isinstance(data, str | Path):
        return None if data is None else str(data)
    if not callable(data):
        raise UsageError(
            f"data: a {type(data).__name__} is neither a text, nor a function that returns a data set, nor a data set "
            "with `__len__` and `__getitem__`"
        )
    return function_source(data, "data")
