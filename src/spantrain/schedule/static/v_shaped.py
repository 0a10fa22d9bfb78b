"""ZB-V: the pipeline goes through all devices and back, so that a device has an early stage and a late one.

With forwards and both halves of backwards equally long, and no time between devices, none of them waits once the
pipeline is full, in the memory of 1F1B. (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, section 4.)
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from spantrain.core.action import Action, Op
from spantrain.core.span import Span
from spantrain.errors import PlanError
from spantrain.schedule.dispatch.registered import RegisteredSchedule
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import Orders, check_room, each_in_turn
from spantrain.schedule.static.zero_bubble import deferred_orders

_REMEDY = "give --schedule critical-path"
Turn = tuple[int, str]
"""Which of the device's two stages, 0 or 1, and an operation."""


def _turns(devices: int, place: int, count: int) -> Iterator[Turn]:
    """Yield what a device does in turn; more of each operation than there are micro-batches."""
    behind = devices - place
    yield from repeat((0, "F"), 2 * behind - 1)
    yield from chain.from_iterable(repeat(((1, "F"), (0, "F")), place))
    yield from chain.from_iterable(repeat(((1, "F"), (1, "I"), (1, "W")), behind))
    steady = ((0, "F"), (0, "I"), (0, "W"), (1, "F"), (1, "I"), (1, "W"))
    yield from chain.from_iterable(repeat(steady, max(0, count - devices)))
    yield from chain.from_iterable(repeat(((0, "I"), (1, "I")), place))  # nothing comes forward any more
    yield from chain.from_iterable(repeat(((0, "I"), (1, "I"), (1, "W"), (0, "W")), count))
    yield from chain.from_iterable(repeat(((0, "W"), (1, "W")), count))


def _order(stages: Sequence[int], spans: Sequence[Sequence[Span]], turns: Iterator[Turn]) -> tuple[Action, ...]:
    """Return the actions: each kind by rising micro-batch, as long as there are any, and as can be by then."""
    done = {(which, op): 0 for which in (0, 1) for op in "FIW"}
    before = {"F": "", "I": "F", "W": "I"}
    order = []
    for which, op in turns:
        number = done[which, op]
        if number == len(spans[which]) or (before[op] and number == done[which, before[op]]):
            continue
        done[which, op] += 1
        whole = stages[which] == 0  # nobody waits for its I
        if not (whole and op == "W"):
            order.append(Action(stages[which], Op.BACKWARD if whole and op == "I" else Op(op), spans[which][number]))
    return tuple(order)


def _orders(layout: CutLayout, split: bool | None) -> Orders:
    """Return the orders; of devices with one stage each, those of ZB-H1.

    Raises:
        PlanError: devices have not two stages each, there and back; stages have other micro-batches, or no room.
    """
    if not layout.shared:
        return deferred_orders(each_in_turn, 1, layout, split)
    crews = layout.crews
    devices, last = len(crews), layout.num_stages - 1
    if list(crews) != [(place, last - place) for place in range(devices)]:
        told = ", ".join("+".join(map(str, stages)) for stages in crews)
        raise PlanError(f"zb-v: devices must have two stages each, there and back; they have {told}; {_REMEDY}")
    counts = {len(own) for row in layout.spans for own in row}
    if len(set(layout.micro_batches)) > 1 or len(counts) > 1:
        raise PlanError(f"zb-v: all stages must have the same micro-batches; {_REMEDY}")
    count = counts.pop()
    found = tuple(
        tuple(_order(stages, own, _turns(devices, place, count)) for own in zip(*rows, strict=True))
        for place, stages in enumerate(crews)
        for rows in [[layout.spans[stage] for stage in stages]]
    )
    check_room("zb-v", found, layout)
    return found


SCHEDULES = (
    RegisteredSchedule(
        name="zb-v",
        description="static: for devices with two stages each, there and back; weights apart, in 1f1b's memory (ZB-V)",
        splits_backward=True,
        orders=_orders,
        shares_devices=True,
    ),
)
