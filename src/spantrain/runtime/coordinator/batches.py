"""Batches that a user's own loop gives, one a step: kept where the loop runs, fetched by the stages that read them.

Devices fetch the inputs and labels that their stages read, each the rows that it works on, over the control plane
(encrypted and authenticated as all calls are; not over the links between sites, which an emulated network shapes). What
is sent are safetensors files, in pieces. Before each step every device asks what to do next, so that the loop may take
its time, save or end between any two steps.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition

import torch
from safetensors.torch import load, save

from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.devices.base import Tensors
from spantrain.errors import ProtocolError, WorkerError
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import COUNTED, EACH, Rows, chosen_rows, counted_labels, for_samples
from spantrain.runtime.control.data_requests import AskNextStep, BatchPiece, FetchRows, NextStep, NextStepAnswer
from spantrain.runtime.control.orders import TrainOrder
from spantrain.runtime.control.plane import ControlPlane
from spantrain.runtime.step.context import WorkerLinks
from spantrain.runtime.step.work import SampledFeed

EXTERNAL = "given"
"""The `ModelSpec.dataset` of such runs."""

_PIECE_BYTES = 4 * 2**20
_LONG_POLL_S = 5.0
_INPUTS, _LABELS = "inputs", "labels"
_COUNTED = {COUNTED: "counted", EACH: "counted each"}
"""What is told of a whole step, by its number among rows."""


class _HeldBatch(Record):
    inputs: Tensors
    labels: torch.Tensor


class BatchQueue:
    """The loop's side; safe from any thread."""

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self._changed = Condition()
        self._batches: dict[int, _HeldBatch] = {}
        self._saves: set[int] = set()
        self._stopped = False

    def give(self, step: int, inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> None:
        """Put a step's batch here, and let all devices begin with it; batches of steps before the last are forgotten.

        Raises:
            ValueError: a tensor does not have one row for each sample of the global batch.
        """
        for name, tensor in (*((f"input {index}", tensor) for index, tensor in enumerate(inputs)), (_LABELS, labels)):
            if tensor.shape[:1] != (self._global_batch,):
                raise ValueError(f"{name} is {tuple(tensor.shape)}; wanted one row for each of {self._global_batch}")
        batch = _HeldBatch(inputs=tuple(tensor.detach().cpu() for tensor in inputs), labels=labels.detach().cpu())
        with self._changed:
            self._batches = {known: kept for known, kept in self._batches.items() if known >= step - 1}
            self._batches[step] = batch
            self._changed.notify_all()

    def tokens(self, step: int) -> int | None:
        """Return how many tokens a step's batch has, if it is not forgotten, and its first input is tokens."""
        with self._changed:
            batch = self._batches.get(step)
        first = batch.inputs[0] if batch and batch.inputs else None
        return first.numel() if first is not None and first.dim() == 2 and not first.is_floating_point() else None

    def save_before(self, step: int) -> None:
        """Have all devices write a checkpoint before this step."""
        with self._changed:
            self._saves.add(step)
            self._changed.notify_all()

    def wants_checkpoint(self, steps_done: int) -> bool:
        """Whether the loop has told all devices to save what they have after so many steps."""
        with self._changed:
            return steps_done in self._saves

    def stop(self) -> None:
        """Have all devices end where they are to wait for a batch."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def answer(self, question: AskNextStep | FetchRows) -> NextStepAnswer | BatchPiece:
        """Answer a device: what to do next, or a piece of a batch; waits for a while if there is nothing yet.

        Raises:
            ProtocolError: there are no such rows.
        """
        if isinstance(question, AskNextStep):
            with self._changed:
                found = self._changed.wait_for(lambda: self._next(question.step, saved=question.saved), _LONG_POLL_S)
            return NextStepAnswer(next=found or NextStep.WAIT)
        return self._piece(question)

    def _next(self, step: int, *, saved: bool) -> NextStep | None:
        if step in self._saves and not saved:
            return NextStep.SAVE
        if step in self._batches:
            return NextStep.GO
        return NextStep.STOP if self._stopped else None

    def _piece(self, wanted: FetchRows) -> BatchPiece:
        part, lo, hi, offset = wanted.part, wanted.lo, wanted.hi, wanted.offset
        with self._changed:
            batch = self._batches.get(wanted.step)
        if (
            batch is None
            or part not in (_INPUTS, _LABELS, *_COUNTED.values())
            or not 0 <= lo < hi <= self._global_batch
            or offset < 0
        ):
            raise ProtocolError(f"there are no {part} {lo} to {hi} of step {wanted.step}")
        if part == _INPUTS:
            tensors = {f"{index:04}": tensor[lo:hi].contiguous() for index, tensor in enumerate(batch.inputs)}
        elif part == _LABELS:
            tensors = {part: batch.labels[lo:hi].contiguous()}
        else:
            number = next(number for number, name in _COUNTED.items() if name == part)
            tensors = {part: counted_labels(batch.labels, 1, number).contiguous()}
        content = save(tensors)
        return BatchPiece(piece=content[offset : offset + _PIECE_BYTES], total=len(content))


class QueuedFeed:
    """A device's side: fetches the rows that it works on."""

    digest = ""
    """Nobody else reads this data."""
    dataset_size = None
    """Whoever gives batches knows it."""

    def __init__(self, control: ControlPlane, check_abort: Callable[[], None]) -> None:
        self._control = control
        self._check_abort = check_abort

    def next_step(self, step: int, save: Callable[[int], None]) -> bool:
        """Wait until the loop has a batch for this step; save meanwhile if it wants that; return whether to run it."""
        saved = False
        while True:
            self._check_abort()
            match self._control.ask(AskNextStep(step=step, saved=saved)).next:
                case NextStep.GO:
                    return True
                case NextStep.STOP:
                    return False
                case NextStep.SAVE:
                    save(step)
                    saved = True
                case NextStep.WAIT:
                    pass

    def rows(self, step: int, span: Span, numbers: Sequence[int]) -> Rows:
        """Fetch these of the inputs and labels."""

        def inputs() -> Tensors:
            found = self._fetch(step, _INPUTS, span)
            return tuple(found[name] for name in sorted(found))

        def tensor(part: str) -> torch.Tensor:
            return self._fetch(step, part, span)[part]

        return chosen_rows(
            numbers, inputs, partial(tensor, _LABELS), lambda number: for_samples(tensor(_COUNTED[number]), span.size)
        )

    def _fetch(self, step: int, part: str, span: Span) -> dict[str, torch.Tensor]:
        content, total = b"", 1
        while len(content) < total:
            rows = FetchRows(step=step, part=part, lo=span.lo, hi=span.hi, offset=len(content))
            answer = self._control.ask(rows)
            if not answer.piece:
                raise WorkerError(f"step {step}: {part} {span} ended after {len(content)} of {total} bytes")
            content, total = content + answer.piece, answer.total
        return load(content)


def feed_of(order: TrainOrder, links: WorkerLinks, *, held_out: bool) -> SampledFeed | QueuedFeed:
    """Return where a device has the samples of a train order from."""
    model = order.plan.model
    if model.dataset == EXTERNAL:
        return QueuedFeed(links.control, links.check_abort)
    return SampledFeed(
        open_dataset(model, held_out=held_out), global_batch=order.plan.global_batch, seed=order.job.order_seed,
        same_every_step=held_out, first_step=order.first_step, samples_before=order.samples_before,
    )  # fmt: skip
