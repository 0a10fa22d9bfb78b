"""Runs one stage's actions on its units: F, I, W and B for spans of samples, in any order that is allowed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import compress, count

import torch
from torch import Tensor, nn

from spantrain.core.span import Span
from spantrain.devices.registry import class_of
from spantrain.errors import ConfigError, ProtocolError, ScheduleError
from spantrain.models.execution.held import HeldMeter, StorageLog
from spantrain.models.execution.segment import HeldSegment, Segment, SegmentShards, Tensors, detached, segments_of
from spantrain.models.low_weights import LowWeights, full_weight, with_low_weights
from spantrain.models.randomness.draws import DrawnSamples
from spantrain.models.statistics import BatchStatistics
from spantrain.models.tensor_parallel.divided import own_part, with_own_part
from spantrain.models.units import LABELS, Rows, UnitModule, parameter_names, rows_read
from spantrain.models.weight_gradients import Final

NamesFinal = Callable[[Iterable[str]], None]
"""Is told names of parameters to whose gradients a pass adds nothing more, while it runs."""


@dataclass(kw_only=True)
class _HeldSpan:
    """What is kept of one span from F to W."""

    segments: tuple[HeldSegment, ...]
    floating_shapes: tuple[torch.Size, ...]
    """Shapes of the outputs that gradients come for; none on the last stage."""
    log: StorageLog | None
    """Where its bytes are counted by watching it (`HeldMeter`)."""
    went_back: bool = False
    """Whether I has run."""

    def note_tensors(self) -> None:
        """Tell the log, if there is one, what is kept now."""
        if self.log is not None:
            self.log.add(*(tensor for segment in self.segments for tensor in segment.tensors))


class StageExecutor:
    """The computation of one replica of one stage; no clock, no network, no choice of order.

    Of recomputed units, F keeps what enters them only; I (or B) runs them again and goes back through them at once, so
    that W has nothing left to do for them (`models.execution.segment`).

    Which gradients flow: every floating-point tensor at a cut has one, in order, and no other tensor has; a tensor
    that nothing depends on has zeros. Where nothing in front is trained, and on the first stage, nobody waits for
    gradients of inputs, so I only keeps what it is given and W does the whole backward (DESIGN section 10: the first
    stage has no I). A stage up to which nothing is trained holds nothing and gets none.

    Losses are summed over samples; the backward pass starts from loss_sum / global_batch, so that gradients of
    all spans and replicas are plain sums. A unit's loss sum is its model's loss times the samples at once; of a model
    that sums over samples itself, that loss counts as it is (`sums_samples`), times global_batch.
    """

    seed: int
    """Of what its units draw at random."""
    loss_scale: float = 1.0
    """What the loss is multiplied by before the backward pass; gradients come out as much larger."""
    shards = SegmentShards()
    """Others than these only where segments are single units."""
    _trains: bool | None = None

    def __init__(
        self,
        units: Sequence[UnitModule],
        *,
        is_last: bool,
        global_batch: int,
        dtype: str = "float32",
        torch_device: torch.device | None = None,
        recompute: Sequence[int] = (),
        trains_before: bool = True,
        statistics: BatchStatistics | None = None,
        fewest_samples: int = 0,
        sums_samples: bool = False,
        seed: int = 0,
        by_unit: bool = False,
    ) -> None:
        """Take the units to the device; `recompute` are positions among them, `seed` is of what they draw at random.

        `dtype` is one of `formats.precision`. With `by_unit`, each unit is a segment of its own.

        Without `trains_before`, nothing in front of the stage is trained, and nobody there waits for gradients.
        `statistics` are those that its normalizations take of the samples of F; None: they go by their running ones.
        With `fewest_samples`, what a unit makes of a sample depends on the others of the span, at least so many.
        """
        assert units, "a stage needs units"
        self._is_last = is_last
        self.seed = seed
        self._global_batch = global_batch
        self._sums_samples = sums_samples
        self._torch_device = device = torch_device or torch.device("cpu")
        self.units = tuple(units)
        # Moved as one module, so that a parameter shared by two units stays one.
        self.meter = HeldMeter(with_low_weights(nn.ModuleList(units), dtype, self._torch_device))
        """Counts the bytes that spans in flight hold."""
        self._name_of: dict[int, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self.names_by_unit = tuple(tuple(self._new_names(unit)) for unit in units)
        """By unit: names of parameters whose gradients are whole when a backward pass is through it."""
        self._segments = segments_of(units, recompute, is_last=is_last, each=by_unit, dtype=dtype, torch_device=device)
        self.low_weights = LowWeights(own for segment in self._segments for own in segment.parameters)
        """To be made anew before each step and evaluation."""
        trained = (any(own.requires_grad for own in segment.parameters) for segment in self._segments)
        self._trains_before = trains_before
        self._first_back = 0 if trains_before else next(compress(count(), trained), len(self._segments))
        """The first segment that a backward pass comes to."""
        self._first_segment = _first_segments(self._segments)
        self._held: dict[Span, _HeldSpan] = {}
        self.statistics = statistics or BatchStatistics(())
        self._fewest_samples, self._by_unit = fewest_samples, by_unit

    def _new_names(self, unit: UnitModule) -> Iterator[str]:
        """Note the parameters that no unit before has; yield their names."""
        for local, full in parameter_names(unit).items():
            parameter = unit.get_parameter(local)
            if id(parameter) not in self._name_of:
                self._name_of[id(parameter)] = full
                self._parameters[full] = full_weight(parameter)
                yield full

    @property
    def keeps_spans(self) -> bool:
        """Whether samples are to run at once as it was planned."""
        return self._fewest_samples > 0 or bool(self.statistics) or self._by_unit

    @property
    def segment_parameters(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """By segment: parameters as they stand in the modules."""
        return tuple(segment.parameters for segment in self._segments)

    @property
    def held_samples(self) -> int:
        """Samples in flight: forwarded, and not yet through W."""
        return sum(span.size for span in self._held)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the unsplit model; one shared by two units has the first's name."""
        return dict(self._parameters)

    def discard(self) -> None:
        """Forget everything held, after an abort; gradients already added to `.grad` stay."""
        self._held.clear()
        self.meter.clear()
        self.statistics.clear()
        self.shards.clear()

    @property
    def reads(self) -> tuple[int, ...]:
        """What its units read of the samples."""
        return rows_read(self.units)

    def forward(self, span: Span, received: Tensors, rows: Rows, *, step: int = 0) -> Tensors:
        """Run F; return detached outputs to send, or on the last stage `(loss_sum,)`, a float32 scalar.

        Args:
            span: the samples; the first dimension of every tensor is theirs.
            received: tensors alive at the cut before the stage; none on the first stage.
            rows: what its units read of the samples.
            step: of the run; what is drawn at random for a sample depends on it.

        Raises:
            ScheduleError: some of the samples are in flight already.
            ProtocolError: a tensor does not have one row for each sample.
            ConfigError: there are fewer samples than the units can do with.
        """
        if span.size < self._fewest_samples:
            raise ConfigError(
                f"samples {span}: stage of {self.units[0].name}: samples depend on each other there, and of fewer than "
                f"{self._fewest_samples} nothing is learnt; plan larger micro-batches, by a larger --global-batch, say"
            )
        if any(span.intersect(other) for other in self._held):
            raise ScheduleError(f"F{span}: some of these samples are in flight: {_listed(self._held)}")
        given = [(f"tensor {index}", one) for index, one in enumerate(received)]
        given += [("labels" if number == LABELS else f"input {number}", row) for number, row in rows.items()]
        for name, tensor in given:
            if tensor.shape[:1] != (span.size,):
                raise ProtocolError(f"F{span}: {name} is {tuple(tensor.shape)}, wanted {span.size} rows")
        log = self.meter.log_for(span)
        samples = self._set_mode(span, step, trains=True)
        with nullcontext() if log is None else log.watching(), self.statistics.of(span):
            segments, outputs = self._run_segments(received, rows, samples)
        sent = () if self._is_last or not segments else outputs
        shapes = tuple(tensor.shape for tensor in sent if tensor.is_floating_point())
        held = self._held[span] = _HeldSpan(segments=segments, floating_shapes=shapes, log=log)
        held.note_tensors()
        if not segments or not segments[-1].outputs:
            self.meter.carried(outputs)
        self.meter.forwarded(span, log)
        return self._to_send(outputs, span)

    def _run_segments(
        self, received: Tensors, rows: Rows, samples: DrawnSamples
    ) -> tuple[tuple[HeldSegment, ...], Tensors]:
        """Run F of all segments; return what those that go back hold, and the last one's outputs, without a graph."""
        tensors, rows = self._moved(received), self._rows_here(rows)
        held: list[HeldSegment] = []
        for number, segment in enumerate(self._segments):
            with self.shards.ahead(number):
                if number < self._first_back:
                    with torch.no_grad():
                        tensors = self.shards.outlive(detached(segment.run(tensors, rows, samples)))
                    continue
                wanted = bool(held) or self._trains_before
                inputs = tuple(_leaf(tensor, wanted=wanted) for tensor in tensors)
                kept, tensors = segment.forward(inputs, rows, samples)
                tensors = self.shards.outlive(tensors)
                held.append(kept)
        return tuple(held), tensors

    def evaluate(self, span: Span, received: Tensors, rows: Rows, *, step: int = 0) -> Tensors:
        """Return what `forward` would in evaluation mode, without holding anything for a backward pass."""
        tensors, rows = self._moved(received), self._rows_here(rows)
        # What draws in any mode draws otherwise than in training.
        samples = self._set_mode(span, -1 - step, trains=False)
        with torch.no_grad():
            for number, segment in enumerate(self._segments):
                with self.shards.ahead(number):
                    tensors = self.shards.outlive(segment.run(tensors, rows, samples))
        return self._to_send(detached(tensors), span)

    def _set_mode(self, span: Span, step: int, *, trains: bool) -> DrawnSamples:
        """Have the units be in a mode; return the samples whose random numbers they draw."""
        if trains != self._trains:
            self._trains = trains
            for unit in self.units:
                unit.train(trains)
        return DrawnSamples(seed=self.seed, step=step, first=span.lo, count=span.size)

    def backward_input(self, span: Span, output_gradients: Tensors) -> Tensors:
        """Run I; return the gradients of the floating-point inputs (none on the first stage).

        Args:
            span: samples that F was run on as one span.
            output_gradients: for each floating-point output, in order; `()` on the last stage.

        Raises:
            ScheduleError: F has not run on exactly this span, or I has.
            ProtocolError: a gradient is missing or has another shape than its output.
        """
        held, gradients = self._begin_backward(span, "I", output_gradients)
        held.went_back = True
        with self.statistics.of(span, again=True):
            for number, kept in self._backwards(held):
                with self.shards.back(number, self._first_back, sums=False):
                    gradients = self._segments[number].backward_input(kept, gradients, held.log)
        held.note_tensors()
        self.meter.carried((*output_gradients, *gradients))
        self.meter.went_back(span, held.log, leaves_weights=True)
        return gradients

    def backward_weight(self, span: Span, final: NamesFinal | None = None) -> Tensors:
        """Run W: add the parameters' gradients of the span to `.grad`, release what was held for it; return no tensors.

        `final` is told, layer by layer from the last to the first, which gradients are done.

        Raises:
            ScheduleError: I has not run on exactly this span.
        """
        held = self._held.get(span)
        if held is None or not held.went_back:
            raise ScheduleError(f"W{span}: I has not run on it; in flight: {_listed(self._held)}")
        with self.statistics.of(span, again=True):
            for number, kept in self._backwards(held):
                with self.shards.back(number, self._first_back, sums=True), self._telling(number, final) as told:
                    self._segments[number].backward_weight(kept, told)
        del self._held[span]
        self.meter.released(span)
        return ()

    def backward(self, span: Span, output_gradients: Tensors, final: NamesFinal | None = None) -> Tensors:
        """Run B, both halves at once; arguments, result and errors as of `backward_input`, `final` as of W."""
        held, gradients = self._begin_backward(span, "B", output_gradients)
        with self.statistics.of(span, again=True):
            for number, kept in self._backwards(held):
                with self.shards.back(number, self._first_back, sums=True), self._telling(number, final) as told:
                    gradients = self._segments[number].backward(kept, gradients, held.log, told)
        del self._held[span]
        self.meter.carried((*output_gradients, *gradients))
        self.meter.went_back(span, held.log, leaves_weights=False)
        return gradients

    def _backwards(self, held: _HeldSpan) -> Iterable[tuple[int, HeldSegment]]:
        return reversed(list(enumerate(held.segments, self._first_back)))

    @contextmanager
    def _telling(self, number: int, final: NamesFinal | None) -> Iterator[Final | None]:
        """Yield what a segment's pass tells of its parameters; those that a segment before has too are not done."""
        if final is None:
            yield None
            return

        def tell(parameters: Iterable[nn.Parameter]) -> None:
            whole = (id(parameter) for parameter in parameters if self._first_segment[id(parameter)] == number)
            final(self._name_of[key] for key in whole)

        yield tell
        tell(self._segments[number].parameters)

    def _moved(self, tensors: Tensors) -> Tensors:
        return class_of(self._torch_device).bring(tensors, self._torch_device)

    def _rows_here(self, rows: Rows) -> Rows:
        return dict(zip(self.reads, self._moved(tuple(rows[number] for number in self.reads)), strict=True))

    def _weight(self, span: Span) -> float:
        """Return what the loss sum of a span's samples is multiplied by."""
        return self._global_batch / span.size if self._sums_samples else 1.0

    def _to_send(self, outputs: Tensors, span: Span) -> Tensors:
        return (outputs[0].float() * self._weight(span),) if self._is_last else outputs

    def _begin_backward(self, span: Span, op: str, output_gradients: Tensors) -> tuple[_HeldSpan, Tensors]:
        """Return what is held, and the gradients to start from: of the loss sum, or those that came."""
        held = self._held.get(span)
        if held is None:
            raise ScheduleError(f"{op}{span}: F has not run on exactly these; in flight: {_listed(self._held)}")
        if held.went_back:
            raise ScheduleError(f"{op}{span}: I has run on it already; only W is left")
        self._set_mode(span, 0, trains=True)
        if self._is_last:
            assert not output_gradients, "the last stage starts from its loss"
            weight = self._weight(span) * self.loss_scale / self._global_batch
            # Filled there: what is copied there waits for all that was queued.
            return held, (torch.full((), weight, device=self._torch_device),)
        if len(held.floating_shapes) != len(output_gradients):
            raise ProtocolError(
                f"{span}: got {len(output_gradients)} output gradients, wanted {len(held.floating_shapes)}"
            )
        for shape, gradient in zip(held.floating_shapes, output_gradients, strict=True):
            if shape != gradient.shape:
                raise ProtocolError(f"{span}: output gradient {tuple(gradient.shape)}, wanted {tuple(shape)}")
        return held, output_gradients


def _first_segments(segments: Sequence[Segment]) -> dict[int, int]:
    """Return, by the identity of a parameter, the first segment that has it."""
    found: dict[int, int] = {}
    for number, segment in enumerate(segments):
        for parameter in segment.parameters:
            found.setdefault(id(parameter), number)
    return found


def _leaf(tensor: Tensor, *, wanted: bool) -> Tensor:
    """Return a tensor that came from before as a leaf, whose gradient is wanted there or not."""
    leaf = own_part(tensor).detach()
    leaf.requires_grad_(wanted and leaf.is_floating_point())
    return with_own_part(tensor, leaf)


def _listed(held: dict[Span, _HeldSpan]) -> str:
    return ", ".join(str(span) for span in held) or "nothing"
