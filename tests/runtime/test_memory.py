"""Measured peaks on the processor: state, what spans hold, messages that wait."""

import torch
from torch import nn

from spantrain.core.span import Span
from spantrain.devices.base import CpuDevice
from spantrain.models.build import build_units
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.runtime.step.work import SampleInbox
from spantrain.runtime.worker.plan_part import peak_bytes

SHAPE = (2, 64, 64)
HIDDEN_BYTES = 4 * 2 * 64 * 64


def middle_stage() -> StageExecutor:
    """Two blocks of GPT-2 tiny, for spans of two samples."""
    units = build_units(resolve_model("gpt2-tiny"), range(2, 4), seed=1)
    return StageExecutor(units, is_last=False, global_batch=8)


def one_step(executor: StageExecutor, optimizer: torch.optim.Optimizer, spans: int) -> None:
    for number in range(spans):
        executor.forward(Span(2 * number, 2 * number + 2), (torch.randn(SHAPE),), {})
    for number in range(spans):
        executor.backward(Span(2 * number, 2 * number + 2), (torch.randn(SHAPE),))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def test_state_is_counted_exactly_and_spans_once_each() -> None:
    torch.set_num_threads(1)
    executor = middle_stage()
    own_bytes = sum(parameter.nbytes for parameter in executor.named_parameters().values())
    optimizer = torch.optim.AdamW(executor.named_parameters().values())
    assert peak_bytes(CpuDevice(), [executor], optimizer) == 2 * own_bytes
    one_step(executor, optimizer, 1)
    one_span = executor.meter.peak_bytes
    state_bytes = 4 * own_bytes + 4 * len(executor.named_parameters())
    assert peak_bytes(CpuDevice(), [executor], optimizer) == state_bytes + one_span
    one_step(executor, optimizer, 3)
    # The gradients that come and go count beside spans that are held, not once for each.
    carried = 2 * HIDDEN_BYTES
    assert executor.meter.peak_bytes == 3 * (one_span - carried) + carried
    assert peak_bytes(CpuDevice(), [executor], optimizer) == state_bytes + executor.meter.peak_bytes


def test_messages_that_wait_are_counted() -> None:
    torch.set_num_threads(1)
    alone, crowded = middle_stage(), middle_stage()
    inbox = SampleInbox()
    crowded.meter.waiting_bytes = inbox.held_bytes
    for number in (1, 2):
        inbox.add(0, "forward", Span(2 * number, 2 * number + 2), (torch.randn(SHAPE),))
    assert inbox.held_bytes() == 2 * HIDDEN_BYTES
    for executor in (alone, crowded):
        executor.forward(Span(0, 2), (torch.randn(SHAPE),), {})
    assert crowded.meter.peak_bytes == alone.meter.peak_bytes + 2 * HIDDEN_BYTES
    inbox.take(0, "forward", Span(2, 6))
    assert inbox.held_bytes() == 0


def test_an_abort_leaves_nothing_counted() -> None:
    executor = middle_stage()
    executor.forward(Span(0, 2), (torch.randn(SHAPE),), {})
    executor.discard()
    executor.meter.peak_bytes = 0
    executor.forward(Span(0, 2), (torch.randn(SHAPE),), {})
    again = middle_stage()
    again.forward(Span(0, 2), (torch.randn(SHAPE),), {})
    assert executor.meter.peak_bytes == again.meter.peak_bytes


def test_watching_leaves_no_cycles_behind() -> None:
    """An operation that saves its own output must not be kept alive by what notes it."""
    executor = middle_stage()
    optimizer = torch.optim.SGD(executor.named_parameters().values(), lr=0.1)
    one_step(executor, optimizer, 2)
    assert executor.held_samples == 0
    log = executor.meter.log_for(Span(0, 3))
    assert log is not None
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softmax(dim=-1))
    with log.watching():
        output = layer(torch.randn(2, 4))
    assert log.look() > 0
    del output
    assert log.look() == 0
