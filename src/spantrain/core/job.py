"""How to train: steps, optimizer, learning rate, clipping; the same for every plan."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from spantrain.core.names import few, unknown_name
from spantrain.core.records import Bounds, NotNegative, Positive, Record, bound_problems, type_problems
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.core.update.optimizers import ParameterGroup, optimizer_fields, optimizer_problems, optimizer_state
from spantrain.core.update.rates import Course, needs_end, rate_factor, schedule_problems
from spantrain.errors import ConfigError
from spantrain.formats.registry import WireFormat

ADAPTERS = ("auto", "paper", "off")
BATCH_NORMS = ("auto", "micro-batch", "replicas", "frozen")
MAX_TRACE_STEPS = 50
_Count = Annotated[int, Bounds(low=0)]
_Part = Annotated[float, Bounds(low=0, under=1)]


class TrainJob(Record):
    """What every worker needs to know besides the plan."""

    steps: Annotated[int, Bounds(low=1)]
    seed: int = 0
    data_seed: int | None = None
    """Of the order of samples; None: `seed`."""
    optimizer: str = "adamw"
    """One of `core.update.optimizers`."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What it takes besides, such as `amsgrad`."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Parameters with options of their own; all others have the job's."""
    learning_rate: Positive = 3e-3
    weight_decay: NotNegative = 0.01
    momentum: _Part = 0.9
    """Momentum of SGD."""
    adam_beta1: _Part = 0.9
    adam_beta2: _Part = 0.999
    adam_epsilon: Positive = 1e-8
    warmup_steps: _Count = 10
    """Of all schedules but `constant`, which has none; the first step of a warm-up has the rate 0."""
    lr_schedule: str = "constant_with_warmup"
    """One of `core.update.rates`."""
    lr_schedule_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What the schedule takes besides, such as `num_cycles`."""
    decay_steps: Annotated[int, Bounds(low=1)] = 1000
    """Where a schedule that falls has fallen."""
    max_grad_norm: Annotated[float | None, Bounds(over=0)] = 1.0
    """Gradients are scaled down to this global norm; None leaves them."""
    checkpoint_every: _Count = 0
    """Steps between checkpoints; 0: only at the end and when interrupted."""
    evaluate_every: _Count = 0
    """Steps between evaluations on held-out data, the start and the end included; 0: never."""
    trace_steps: Annotated[int, Bounds(low=0, high=MAX_TRACE_STEPS)] = 3
    """The last so many steps go into the trace; at most 50."""
    loss_scale: Positive = 65536.0
    """Under float16: what the loss is multiplied by at first (`runtime.gradients.optimizer`)."""
    adapter: str = "auto"
    """What follows the network while it trains (`docs/adapter.md`)."""
    allow_wire: tuple[WireFormat, ...] = ()
    """What `auto` may send over slow cuts, besides what the plan says."""
    batch_norm: str = "auto"
    """What normalizations go by that keep running statistics: `micro-batch`, the statistics of the samples that a
    device runs at once; `replicas`, of the same micro-batch on all replicas of a stage; `frozen`, their running ones;
    `auto`: the first for models that are brought, the last for the catalogue's, which begin with weights for that."""
    staleness: int = 0
    """How many steps old the weights are that a step works on: 1 lets steps overlap (`schedule.dispatch.policies`)."""

    def __post_init__(self) -> None:
        problems = type_problems(self) or [*self._unknown_words(), *bound_problems(self), *self._contradictions()]
        if problems:
            raise ValueError("; ".join(problems))

    def takes_batch_statistics(self, model: ModelSpec) -> bool:
        """Whether normalizations of a model go by the statistics of micro-batches."""
        return self.batch_norm in ("micro-batch", "replicas") or (self.batch_norm == "auto" and model.is_brought)

    @property
    def joins_statistics(self) -> bool:
        """Whether they are those of all replicas of a stage together (`schedule.joint`)."""
        return self.batch_norm == "replicas"

    def about_statistics(self, model: ModelSpec, graph: UnitGraph) -> str:
        """Say in a line what statistics normalizations of a model go by; empty: it has none that keep any.

        Raises:
            ConfigError: one is in two units, so that they cannot be kept as on one device.
        """
        names = [name for unit in graph.units for name in unit.batch_norms]
        if not names:
            return ""
        where = f"in {len(names)} module{'s' if len(names) > 1 else ''} ({few(names)})"
        if not self.takes_batch_statistics(model):
            return f"batch statistics are frozen, at what the model begins with, {where}"
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(
                f"model {model.name}: {twice[0]} is used by two units, and its running statistics would depend on the "
                "plan; use one module for each place, or give --batch-norm frozen"
            )
        whose = "on all replicas of a stage together" if self.joins_statistics else "that a device runs at once"
        return (
            f"batch statistics are each micro-batch's, of the samples {whose}, {where}; running "
            "ones follow all micro-batches of a step in the order of samples; other micro-batches give other losses"
        )

    def _unknown_words(self) -> Iterator[str]:
        yield from optimizer_problems(self.optimizer, self.optimizer_options)
        if self.adapter not in ADAPTERS:
            yield unknown_name("adapter", self.adapter, ADAPTERS)
        if self.batch_norm not in BATCH_NORMS:
            yield unknown_name("batch_norm", self.batch_norm, BATCH_NORMS)

    def _contradictions(self) -> Iterator[str]:
        yield from schedule_problems(self.lr_schedule, self._course, self.lr_schedule_options)
        if needs_end(self.lr_schedule) and self.decay_steps <= self.warmup_steps:
            yield f"decay_steps ({self.decay_steps}) must exceed warmup_steps ({self.warmup_steps})"
        options = self.optimizer_options
        if options.get("nesterov") and (not self.momentum or options.get("dampening")):
            yield "option nesterov of optimizer sgd needs momentum, and dampening 0; give momentum=0.9, or leave it out"
        for group in self.parameter_groups:
            yield from self._group_problems(group)
        if self.staleness not in (0, 1):
            yield f"staleness must be 0 (exact) or 1, got {self.staleness}"
        if self.staleness and self.joins_statistics:
            yield (
                "batch_norm replicas needs steps one after the other, since replicas would mix two in orders of their "
                "own and wait for each other for ever; give staleness 0, or batch_norm micro-batch"
            )
        elif self.staleness and self.adapter != "off":
            yield f"staleness 1 goes with adapter off, got {self.adapter}: plans change between steps only"

    def _group_problems(self, group: ParameterGroup) -> Iterator[str]:
        where = f"options of {group.names[0]}" if group.names else "options of no parameter"
        try:
            state = self.of_group(group).optimizer_state
        except ValueError as error:
            yield f"{where}: {error}"
        else:
            if state != self.optimizer_state:
                yield f"{where}: what changes the state of {self.optimizer} is for all, got {dict(group.options)}"

    def of_group(self, group: ParameterGroup) -> "TrainJob":
        """Return the job as it is for a group's parameters.

        Raises:
            ValueError: its options make no sense.
        """
        return replace(self, parameter_groups=(), **optimizer_fields(self.optimizer, group.options))

    @property
    def order_seed(self) -> int:
        """What the order of samples is drawn by."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def _course(self) -> Course:
        return Course(warmup_steps=self.warmup_steps, end=self.decay_steps, learning_rate=self.learning_rate)

    def rate_factor(self, step: int) -> float:
        """Return the part of the full learning rate that a step has."""
        return rate_factor(self.lr_schedule, step, self._course, self.lr_schedule_options)

    @property
    def optimizer_state(self) -> str:
        """Return the optimizer by the state that it keeps, as `cost.memory` knows it."""
        return optimizer_state(self.optimizer, self.momentum, self.optimizer_options)
