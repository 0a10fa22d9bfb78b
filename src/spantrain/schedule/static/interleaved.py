"""Interleaved 1F1B: a round of micro-batches goes through a device's first stage, then through its next, and so on.

(Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2.)
"""

from collections.abc import Sequence
from itertools import pairwise

from spantrain.core.action import Action, Op
from spantrain.core.span import Span
from spantrain.errors import PlanError
from spantrain.schedule.dispatch.registered import RegisteredSchedule
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import Orders, check_room, each_in_turn, in_turn, warm_up_counts

_REMEDY = "give --schedule critical-path"


def rounds_of(count: int, devices: int) -> list[range]:
    """Return the micro-batches of each round: as many as there are devices, or a few more where that does not divide.

    >>> rounds_of(8, 4), rounds_of(3, 4), rounds_of(9, 4)
    ([range(0, 4), range(4, 8)], [range(0, 3)], [range(0, 5), range(5, 9)])
    """
    number = max(1, count // devices)
    ends = [(count * k + number - 1) // number for k in range(number + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def _orders(layout: CutLayout, split: bool | None) -> Orders:
    """Return the orders; of devices with one stage each, those of 1F1B.

    Raises:
        PlanError: devices have not as many stages each, in turn; stages have other micro-batches; limits are too small.
    """
    if not layout.shared:
        return in_turn(layout, warm_up_counts(layout, each_in_turn), split=bool(split))
    crews = layout.crews
    devices, chunks = len(crews), len(crews[0])
    if list(crews) != [tuple(range(first, devices * chunks, devices)) for first in range(devices)]:
        told = ", ".join("+".join(map(str, stages)) for stages in crews)
        raise PlanError(f"interleaved: devices must have as many stages each, in turn; they have {told}; {_REMEDY}")
    counts = {len(own) for row in layout.spans for own in row}
    if len(set(layout.micro_batches)) > 1 or len(counts) > 1:
        raise PlanError(f"interleaved: all stages must have the same micro-batches; {_REMEDY}")
    rounds = rounds_of(counts.pop(), devices)
    found = []
    for place, stages in enumerate(crews):
        warm = 2 * (devices - place - 1) + (chunks - 1) * len(rounds[0])
        spans = zip(*(layout.spans[stage] for stage in stages), strict=True)
        row = tuple(_order(dict(zip(stages, own, strict=True)), rounds, warm, split=bool(split)) for own in spans)
        found.append(row)
    check_room("interleaved", found, layout)
    return tuple(found)


def _order(
    spans: dict[int, tuple[Span, ...]], rounds: Sequence[range], warm: int, *, split: bool
) -> tuple[Action, ...]:
    """Return a device's order: `warm` forwards, then a forward and a backward in turn, then backwards."""
    stages, ops = list(spans), (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if split else (Op.BACKWARD,)
    forwards = [Action(stage, Op.FORWARD, spans[stage][k]) for batch in rounds for stage in stages for k in batch]
    order = forwards[:warm]
    backwards = [(stage, k) for batch in rounds for stage in reversed(stages) for k in batch]
    for position, (stage, k) in enumerate(backwards, start=warm):
        order += forwards[position : position + 1]
        order += [Action(stage, op, spans[stage][k]) for op in ops]
    return tuple(order)


SCHEDULES = (
    RegisteredSchedule(
        name="interleaved",
        description="static: interleaved 1F1B, for devices with several stages each; else as 1f1b (Megatron)",
        splits_backward=False,
        orders=_orders,
        shares_devices=True,
    ),
)
