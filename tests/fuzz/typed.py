"""Valid plain values of dataclasses, made at random from the types of their fields."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from random import Random
from typing import Any, Union, get_args, get_origin, get_type_hints

from spantrain.config.files.json_codec import to_json
from spantrain.core.action import Action
from spantrain.core.checkpoint import StoredFile
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.outer.events import Ticket
from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout, ShardRun
from spantrain.core.plan import Plan
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.outer.link.codec import encode_value
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule
from testing.plans import plan_of
from testing.sites import sites_cluster, sites_profile

_WORDS = (
    "a",
    "s0",
    "edge-0",
    "float32",
    "forward",
    "push",
    "w",
    "cluster",
    "shard",
    "worker",
    "tcp://10.0.0.1:5000",
    "",
)
_NUMBERS = (0, 1, 2, 3, 8, 64, 4096)
_TEXT_FORMS: Mapping[Any, tuple[str, ...]] = {
    Span: ("[0:8]", "[8:16]", "[0:1]"),
    Action: ("0F[0:8]", "1B[8:16]", "0W[0:8]"),
    Ticket: ("1.1", "1.2", "2.7"),
}


@cache
def _valid() -> Mapping[Any, Any]:
    """Values of types that hardly come about by chance."""
    plan = plan_of([(equal_spans(8, 4), (0.5, 0.5), (2, 2)), (equal_spans(8, 2), (1.0,), (4,))])
    layers = tuple(Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.weight", shape=(2, 3)),)) for k in range(3))
    layout = ShardLayout(
        layers=layers, runs=(ShardRun(shard="s0", first=0, end=2), ShardRun(shard="s1", first=2, end=3))
    )
    return {
        Plan: to_json(plan),
        Cluster: to_json(plan.cluster),
        ModelSpec: to_json(plan.model),
        UnitGraph: to_json(sites_profile(sites_cluster({})).graph),
        TrainJob: to_json(TrainJob(steps=3)),
        StoredFile: to_json(StoredFile(device="edge-0", sha256="0" * 64, size_bytes=3)),
        Layer: encode_value(layers[0]),
        ShardLayout: encode_value(layout),
        OuterRule: encode_value(Nesterov()),
        OuterSettings: encode_value(OuterSettings()),
    }


def plain_of(kind: Any, chance: Random, *, depth: int = 6) -> Any:
    """Return what a value of a type looks like on the wire; what a dataclass itself demands may not be met."""
    if isinstance(kind, type) and kind in _valid() and chance.random() < 0.9:
        return _valid()[kind]
    if kind in (bool, int, float, str):
        return {
            bool: chance.random() < 0.5,
            int: chance.choice(_NUMBERS),
            float: chance.choice((0.0, 0.5, 1.0, 3.25)),
            str: chance.choice(_WORDS),
        }[kind]
    if kind in _TEXT_FORMS:
        return chance.choice(_TEXT_FORMS[kind])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return chance.choice(list(kind)).value
    if is_dataclass(kind):
        return _table(kind, chance, depth)
    return _container(kind, chance, depth)


def _table(kind: Any, chance: Random, depth: int) -> dict[str, Any]:
    return {
        name: plain_of(hint, chance, depth=depth - 1)
        for name, (hint, optional) in _fields(kind).items()
        if not (optional and (depth <= 0 or chance.random() < 0.1))
    }


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    hints = get_type_hints(kind)
    return {
        one.name: (hints[one.name], one.default is not MISSING or one.default_factory is not MISSING)
        for one in fields(kind)
    }


def _container(kind: Any, chance: Random, depth: int) -> Any:
    origin, hints = get_origin(kind), get_args(kind)
    few = 0 if depth <= 0 else chance.choice((0, 1, 1, 2))
    if origin in (Union, types.UnionType):
        known = [hint for hint in hints if hint is not types.NoneType]
        none = types.NoneType in hints and (depth <= 0 or chance.random() < 0.3)
        return None if none else plain_of(chance.choice(known), chance, depth=depth - 1)
    if origin is tuple and not (len(hints) == 2 and hints[1] is ...):
        return [plain_of(hint, chance, depth=depth - 1) for hint in hints]
    if origin is tuple:
        return [plain_of(hints[0], chance, depth=depth - 1) for _ in range(few)]
    if origin is not None and issubclass(origin, Mapping):
        keys = [plain_of(hints[0], chance) for _ in range(few)]
        return {str(key): plain_of(hints[1], chance, depth=depth - 1) for key in keys}
    return chance.choice((None, 1, "x"))
