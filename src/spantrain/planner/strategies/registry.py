"""Strategies by name: ours, and those that installed packages add (`docs/contributing.md` has the recipe)."""

from collections.abc import Mapping, Sequence
from functools import cache

from spantrain.core.names import unknown_name
from spantrain.core.records import Record
from spantrain.errors import UsageError
from spantrain.planner.request import Strategy
from spantrain.planner.strategies import baselines
from spantrain.planner.strategies.auto.strategy import auto
from spantrain.planner.strategies.interleaved import interleaved
from spantrain.planner.strategies.spantrain.strategy import spantrain, spantrain_paper
from spantrain.planner.strategies.spantrain_dp.strategy import spantrain_dp
from spantrain.plugins import with_plugins

DEFAULT_STRATEGY = "auto"
ENTRY_POINTS = "spantrain.strategies"
"""The group of entry points of which each names a `RegisteredStrategy`."""


class RegisteredStrategy(Record):
    """A strategy, and a line on it."""

    propose: Strategy
    description: str
    small_only: bool = False
    """Whether it is for small cases only, and so not among `all`."""


_OURS: Mapping[str, tuple[Strategy, str]] = {
    "auto": (auto, "ours: devices, order, cuts, shares and micro-batches together, then simulated"),
    "spantrain": (
        spantrain,
        "beam over groups and layers, asymmetric parallelism inside groups (SpanTrain, English paper)",
    ),
    "spantrain-paper": (spantrain_paper, "spantrain with all devices at work, in the paper's order, `compact`"),
    "spantrain-dp": (
        spantrain_dp,
        "two-level groups, dynamic programme over layers and domains (SpanTrain, Chinese paper)",
    ),
    "single-device": (baselines.single_device, "the best device alone"),
    "single-site": (baselines.single_site, "the best site alone, by spantrain-dp"),
    "ddp": (baselines.DDP, "the whole model on every device, equal shares"),
    "zero1": (baselines.ZERO1, "ddp with the optimizer's state divided (ZeRO-1)"),
    "zero2": (baselines.ZERO2, "ddp with gradients and optimizer state divided (ZeRO)"),
    "fsdp": (baselines.FSDP, "ddp with all state divided, as in PyTorch FSDP (ZeRO-3)"),
    "offload": (baselines.offload, "the best device alone, its state in its host's memory (ZeRO-Offload)"),
    "interleaved": (interleaved, "several stages on each device in cluster order, the order searched"),
    "gpipe": (baselines.GPIPE, "equal layers in cluster order, all forwards first"),
    "1f1b": (baselines.ONE_F_ONE_B, "equal layers in cluster order, 1F1B"),
}


@cache
def strategies() -> Mapping[str, RegisteredStrategy]:
    """Return all strategies by name: ours first, then those of installed packages, by name.

    Raises:
        UsageError: a package's strategy cannot be loaded, is none, or has the name of one that is there already.
    """
    ours = {name: RegisteredStrategy(propose=propose, description=line) for name, (propose, line) in _OURS.items()}
    return with_plugins(ours, ENTRY_POINTS, RegisteredStrategy, "strategy")


def strategies_named(names: Sequence[str]) -> tuple[str, ...]:
    """Return the strategies of these names, each once; `all` is every one but those for small cases.

    Raises:
        UsageError: there is no such strategy; the message has the names and a near match.
    """
    known = strategies()
    found: dict[str, None] = {}
    for name in names:
        if name == "all":
            found |= {entry: None for entry, strategy in known.items() if not strategy.small_only}
        elif name in known:
            found[name] = None
        else:
            raise UsageError(unknown_name("strategy", name, ("all", *known)))
    return tuple(found)
