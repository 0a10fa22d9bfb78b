"""The methods of a comparison by name: other frameworks, our runtime under each strategy's plan."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spantrain.errors import UsageError
from spantrain.planner.strategies.registry import DEFAULT_STRATEGY, strategies
from spantrain_studies.comparison.worker.orders import Framework


class MethodKind(StrEnum):
    """What runs a method."""

    FRAMEWORK = "framework"
    PLAN = "plan"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of a comparison."""

    name: str
    kind: MethodKind
    description: str
    strategy: str = ""
    """Strategy of the planner, for our runtime."""
    adapter: str = "off"
    """What follows the network while our runtime trains."""


_FRAMEWORK_LINES = {
    Framework.DDP: "torch DistributedDataParallel, equal batches",
    Framework.FSDP: "torch fully_shard (FSDP2), equal batches",
    Framework.GPIPE: "torch ScheduleGPipe, equal units",
    Framework.ONE_F_ONE_B: "torch Schedule1F1B, equal units",
    Framework.INTERLEAVED: "torch ScheduleInterleaved1F1B, equal units, two stages a device",
    Framework.ZERO_BUBBLE: "torch ScheduleInterleavedZeroBubble, equal units",
    Framework.ZERO_BUBBLE_V: "torch ScheduleZBVZeroBubble, equal units, two stages a device",
}
_OWN_NAMES = {"single-device": "best-device", "single-site": "best-site", "ddp": "ours-ddp", "fsdp": "ours-fsdp"}
"""Names for strategies whose own name says something else here."""


def _methods() -> tuple[Method, ...]:
    frameworks = (
        Method(name=str(framework), kind=MethodKind.FRAMEWORK, description=line)
        for framework, line in _FRAMEWORK_LINES.items()
    )
    plans = (
        Method(
            name=_OWN_NAMES.get(name, name),
            kind=MethodKind.PLAN,
            description=f"our runtime; {entry.description}",
            strategy=name,
            adapter="auto" if name == DEFAULT_STRATEGY else "off",
        )
        for name, entry in strategies().items()
        if not entry.small_only
    )
    adapters = (
        Method(
            name=f"{DEFAULT_STRATEGY}-adapter-{adapter}",
            kind=MethodKind.PLAN,
            description=f"our runtime; our plan with --adapter {adapter}",
            strategy=DEFAULT_STRATEGY,
            adapter=adapter,
        )
        for adapter in ("off", "paper")
    )
    return (*frameworks, *plans, *adapters)


METHODS = {method.name: method for method in _methods()}
GROUPS = {
    "all": tuple(METHODS),
    "frameworks": tuple(name for name, method in METHODS.items() if method.kind is MethodKind.FRAMEWORK),
    "baselines": ("best-device", "best-site"),
    "strategies": tuple(name for name, method in METHODS.items() if method.strategy),
    "adapters": ("auto", "auto-adapter-off", "auto-adapter-paper"),
}


def methods_named(names: Sequence[str]) -> tuple[Method, ...]:
    """Return methods by name, or by the name of a group, each once and in the order given.

    Raises:
        UsageError: there is no such method; the message has the names and a near match.

    >>> [method.name for method in methods_named(["auto", "baselines", "auto"])]
    ['auto', 'best-device', 'best-site']
    """
    found: dict[str, Method] = {}
    for name in names:
        if name not in METHODS and name not in GROUPS:
            near = difflib.get_close_matches(name, (*METHODS, *GROUPS), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"unknown method {name!r}; {hint}choose {', '.join(GROUPS)}, or some of {', '.join(METHODS)}"
            )
        found |= {entry: METHODS[entry] for entry in GROUPS.get(name, (name,))}
    return tuple(found.values())
