"""Strategies by name."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from spantrain.errors import UsageError
from spantrain.planner.request import Strategy
from spantrain.planner.strategies.alpa import alpa
from spantrain.planner.strategies.asteroid import asteroid
from spantrain.planner.strategies.auto import auto
from spantrain.planner.strategies.dapple import dapple
from spantrain.planner.strategies.ddp import ddp
from spantrain.planner.strategies.eddl import eddl
from spantrain.planner.strategies.equal_layers import GPIPE, ONE_F_ONE_B
from spantrain.planner.strategies.exhaustive import exhaustive
from spantrain.planner.strategies.fsdp import fsdp
from spantrain.planner.strategies.hetpipe import hetpipe
from spantrain.planner.strategies.metis import metis
from spantrain.planner.strategies.pipedream import pipedream
from spantrain.planner.strategies.sailor import sailor
from spantrain.planner.strategies.single_device import single_device
from spantrain.planner.strategies.single_site import single_site
from spantrain.planner.strategies.spantrain import spantrain
from spantrain.planner.strategies.spantrain_dp import spantrain_dp
from spantrain.planner.strategies.zero2 import zero2

__all__ = ["DEFAULT_STRATEGY", "STRATEGIES", "RegisteredStrategy", "strategies_named"]

DEFAULT_STRATEGY = "auto"


@dataclass(frozen=True, kw_only=True)
class RegisteredStrategy:
    """A strategy, and a line on it."""

    propose: Strategy
    description: str
    small_only: bool = False
    """Whether it is for small cases only, and so not among `all`."""


STRATEGIES: Mapping[str, RegisteredStrategy] = MappingProxyType(
    {
        "auto": RegisteredStrategy(
            propose=auto, description="ours: devices, order, cuts, shares and micro-batches together, then simulated"
        ),
        "spantrain": RegisteredStrategy(
            propose=spantrain,
            description="beam over groups and layers, asymmetric parallelism inside groups (SpanTrain, English paper)",
        ),
        "spantrain-dp": RegisteredStrategy(
            propose=spantrain_dp,
            description="two-level groups, dynamic programme over layers and domains (SpanTrain, Chinese paper)",
        ),
        "single-device": RegisteredStrategy(propose=single_device, description="the best device alone"),
        "single-site": RegisteredStrategy(propose=single_site, description="the best site alone, by spantrain-dp"),
        "ddp": RegisteredStrategy(propose=ddp, description="the whole model on every device, equal shares"),
        "zero2": RegisteredStrategy(propose=zero2, description="ddp with gradients and optimizer state divided (ZeRO)"),
        "fsdp": RegisteredStrategy(propose=fsdp, description="ddp with all state divided, as in PyTorch FSDP (ZeRO-3)"),
        "eddl": RegisteredStrategy(propose=eddl, description="the whole model on every device, shares by capacity"),
        "gpipe": RegisteredStrategy(propose=GPIPE, description="equal layers in cluster order, all forwards first"),
        "1f1b": RegisteredStrategy(propose=ONE_F_ONE_B, description="equal layers in cluster order, 1F1B"),
        "pipedream": RegisteredStrategy(
            propose=pipedream, description="PipeDream's partition for alike devices, with a flush"
        ),
        "dapple": RegisteredStrategy(propose=dapple, description="DAPPLE's partition over machines in cluster order"),
        "asteroid": RegisteredStrategy(
            propose=asteroid, description="Asteroid's stages of devices sorted by memory, 1F1B with its warm-up"
        ),
        "hetpipe": RegisteredStrategy(propose=hetpipe, description="HetPipe's equal virtual workers, with a flush"),
        "alpa": RegisteredStrategy(propose=alpa, description="Alpa's stages on alike submeshes of samples or tensors"),
        "metis": RegisteredStrategy(
            propose=metis, description="Metis's uneven device groups with balanced samples and layers"
        ),
        "sailor": RegisteredStrategy(
            propose=sailor, description="Sailor's choice of devices, tensor groups and equally wide stages"
        ),
        "exhaustive": RegisteredStrategy(
            propose=exhaustive, description="the optimum of small cases, by trying everything", small_only=True
        ),
    }
)
"""Ours first, then what others do."""


def strategies_named(names: Sequence[str]) -> tuple[str, ...]:
    """Return the strategies of these names, each once; `all` is every one but those for small cases.

    Raises:
        UsageError: there is no such strategy; the message has the names and a near match.
    """
    found: dict[str, None] = {}
    for name in names:
        if name == "all":
            found |= {entry: None for entry, strategy in STRATEGIES.items() if not strategy.small_only}
        elif name in STRATEGIES:
            found[name] = None
        else:
            near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"unknown strategy {name!r}; {hint}choose all, or some of {', '.join(STRATEGIES)}")
    return tuple(found)
