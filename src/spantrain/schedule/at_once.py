"""How many samples a plan's devices run at once: where a sample is not by itself to a unit, losses depend on it."""

from collections.abc import Collection, Iterator

from spantrain.core.plan import Plan
from spantrain.core.units import UnitGraph
from spantrain.errors import PlanError

_SHOWN = 2


def samples_at_once(plan: Plan, units: Collection[int]) -> tuple[int, int]:
    """Return the fewest and the most samples that a device runs at once, in the stages of some units."""
    stages = [stage for stage in plan.stages if not set(stage.units).isdisjoint(units)]
    sizes = {size for stage in stages for own in stage.sizes_by_replica for size in own}
    return min(sizes), max(sizes)


def about_samples(plan: Plan, graph: UnitGraph) -> Iterator[str]:
    """Say before a run, a line each, how a loss comes of samples that are not each by itself."""
    whole = [unit.whole_micro_batch for unit in graph.units if unit.whole_micro_batch is not None]
    if whole:
        why = list(dict.fromkeys(one.why for one in whole))
        few, many = samples_at_once(plan, [n for n, unit in enumerate(graph.units) if unit.whole_micro_batch])
        yield (
            f"Samples depend on each other: {'; '.join(why[:_SHOWN])}{'; ...' if len(why) > _SHOWN else ''}: computed "
            "over the samples that a device runs at once, as plain PyTorch does where gradients are accumulated; under "
            f"this plan of {few} to {many} samples; other micro-batches give other losses"
        )
    if graph.sums_samples:
        yield (
            f"The loss is a sum over samples: a step's is over all {plan.global_batch}, as plain PyTorch has it of "
            "the whole step at once; transformers.Trainer divides it by gradient_accumulation_steps"
        )


def check_samples_at_once(plan: Plan, graph: UnitGraph) -> None:
    """Refuse a plan by which a device runs fewer samples at once than a unit can do with.

    Raises:
        PlanError: it does.
    """
    for index, stage in enumerate(plan.stages):
        fewest, (few, _) = graph.fewest_samples(stage.units), samples_at_once(plan, stage.units)
        if few < fewest:
            why = next(one.why for unit in stage.units if (one := graph.units[unit].whole_micro_batch) is not None)
            raise PlanError(
                f"stage {index}: runs {few} sample at once, and {why}: of fewer than {fewest} nothing is learnt; plan "
                "larger micro-batches, by a larger --global-batch, say"
            )
