"""`gpipe` and `1f1b`: pipelines of equally many layers over all devices, in the order of the cluster file.

What one gets from GPipe (Huang et al., NeurIPS 2019) and from PipeDream-Flush or Megatron-LM's 1F1B (Narayanan et al.,
ICML 2021 and SC 2021) without planning. Kept: the order of work, and what it holds in memory. Of the micro-batch sizes
the best is taken, as a user would who tries them out. Not kept: recomputing activations. Devices beyond the number of
units are left out.
"""

from collections.abc import Iterator
from functools import partial

from spantrain.core.span import apportion
from spantrain.planner.assembly.assemble import Assembler, StageShape
from spantrain.planner.request import PlanRequest, Proposal, Strategy


def _equal_layers(schedule: str, request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose a stage for each device, all with equally many units, in an order of work.

    Raises:
        InfeasiblePlanError: a stage does not fit on its device with any micro-batch size.
    """
    assembler = Assembler(request)
    return assembler.best(_options(assembler, request), schedule)


def _options(assembler: Assembler, request: PlanRequest) -> Iterator[tuple[tuple[StageShape, ...], int, None]]:
    devices = request.devices_within_quotas[: assembler.units]
    shapes, first = [], 0
    for name, count in zip(devices, apportion(assembler.units, [1.0] * len(devices)), strict=True):
        shapes.append(StageShape(units=range(first, first + count), devices=(name,)))
        first += count
    for size in request.job.micro_batch_sizes():
        yield tuple(shapes), size, None


GPIPE: Strategy = partial(_equal_layers, "gpipe")
ONE_F_ONE_B: Strategy = partial(_equal_layers, "1f1b")
