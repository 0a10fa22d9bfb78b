"""A unit that runs the unedited model's own forward, with stubs in the place of what other units do."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from spantrain.models.randomness.places import START
from spantrain.models.tracing.batch import Loss, ModelBatch, call_named, picked, taken_names
from spantrain.models.tracing.factory import calls_compiled
from spantrain.models.tracing.stubs.calls import Calls, Row
from spantrain.models.tracing.stubs.cut import StubPart
from spantrain.models.tracing.stubs.shell import Shell, StubRun
from spantrain.models.tracing.tape import StandIn
from spantrain.models.tracing.unit import BroughtUnit, carried_line, stand_in
from spantrain.models.units import Rows


class StubbedUnit(BroughtUnit):
    """The modules that the forward calls for this unit, and weights outside of those that it needs.

    The rest of the model is its shell, which all units that are built together have in common.
    """

    _start = START

    def __init__(
        self, name: str, part: StubPart, calls: Calls, shell: Shell, batch: ModelBatch, loss: Loss, *, model: str
    ) -> None:
        """Take what the part needs out of a shell; `batch` is an example, `model` a name for messages."""
        super().__init__(name, part, loss if part.end == len(calls.calls) else None)
        self._part, self._calls, self._shell, self._model = part, calls, shell, model
        self._batch, self._names = batch.resized(1), taken_names(batch, loss)
        self.around = shell.names
        for path in (*part.modules, *shell.fixed):
            self._hold(f"m{len(self.prefixes)}", path, shell.children[path])
        buffers = [full for full in shell.tensors if full not in calls.direct]
        for full in (*part.weights, *buffers):
            self._hold_weight(full, shell.tensors[full])
        self._has = {*part.weights, *buffers}
        self._calls_compiled = calls_compiled(self)
        self._read(part.reads, counts=batch.counts_labels)
        self.eval()

    def extra_repr(self) -> str:
        """List what comes in, the calls, and what goes out, with values numbered from the unit's own first one."""
        part, numbers = self._part, dict[int, int]()
        lines = [f"takes {carried_line(part.takes, numbers)}", f"reads {part.reads}"]
        lines += [self._local[call.path] for call in self._calls.calls[part.first : part.end]]
        return "\n".join((*lines, f"gives {carried_line(part.gives, numbers)}"))

    def _result(self, found: dict[int, Tensor], rows: Rows, samples: int, place: torch.device) -> Any:
        run = StubRun(
            name=self._model,
            calls=self._calls,
            part=self._part,
            child=lambda path: self.get_submodule(self._local[path]),
            tensor=lambda full: self._weight(full) if full in self._has else None,
            found=found,
            samples=samples,
            place=place,
            trains=self.training,
        )
        given = {number: self._row(number, rows, run) for number in self._names}
        result = call_named(partial(self._shell.run, run), given, self._names)
        return None if self._loss is None else picked(self._loss, result, f"model {self._model}")

    def _row(self, number: int, rows: Rows, run: StubRun) -> Tensor:
        """Return what the model is given; what is not needed in this unit is zeros."""
        tensor = rows.get(number)
        if tensor is None:
            example = self._batch.rows[number]
            tensor = stand_in(StandIn((run.samples, *example.shape[1:]), example.dtype), run.samples, run.place)
        return tensor.clone() if Row(number) in self._calls.written_into else tensor
