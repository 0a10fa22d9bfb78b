"""What the master lets in: who may join as what, which model fits, who may say what."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from spantrain.core.outer import events as on
from spantrain.core.outer.events import OuterEvent
from spantrain.core.outer.layers import Layer
from spantrain.outer.link.link import MemberFacts
from spantrain.outer.master.config import MasterConfig

_CURVE_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_SHOWN = 5


def join_problem(name: str, facts: MemberFacts, config: MasterConfig) -> str | None:
    """Return why a member cannot be let in, None if it can.

    >>> from spantrain.outer.link.link import MemberFacts
    >>> config = MasterConfig(shards=("s0", "s1"), encrypted=False)
    >>> join_problem("s2", MemberFacts(kind="shard", public_key="", endpoint="tcp://h:1"), config)
    's2 is none of the shards s0, s1: start it under one of these names'
    """
    if facts.kind == "shard":
        if name not in config.shards:
            return f"{name} is none of the shards {', '.join(config.shards)}: start it under one of these names"
        if not facts.endpoint:
            return f"shard {name} must listen, and tell where: clusters dial it"
    elif name in config.shards:
        return f"{name} is a shard's name: take another for a {facts.kind}"
    elif facts.kind == "cluster" and "/" in name:
        return f"a cluster's name has no slash, got {name}: that is for its further workers"
    elif facts.kind == "worker" and config.settings.fragments > 1:
        return (
            f"{name} is a stage of a pipeline, and this master has the model in {config.settings.fragments} fragments: "
            "a pipeline takes part only with `fragments: 1` in the master's settings"
        )
    elif facts.kind == "worker" and not all(name.partition("/")):
        return f"a worker is named as its cluster, a slash and a name of its own, like a/w1; got {name}"
    return _key_problem(name, facts, config.encrypted)


def _key_problem(name: str, facts: MemberFacts, encrypted: bool) -> str | None:
    if not encrypted:
        remedy = "switch encryption off there, or on at the master"
        return f"{name} encrypts its data, this run does not: {remedy}" if facts.public_key else None
    if not facts.public_key:
        return f"{name} does not encrypt its data, this run does: switch encryption on there, or off at the master"
    if _CURVE_KEY.fullmatch(facts.public_key) is None:
        return f"{name}: a public key has 40 characters of Z85, got {len(facts.public_key)} characters"
    return None


def model_problem(known: Sequence[Layer], told: Sequence[Layer]) -> str | None:
    """Return how a cluster's model differs from the one that is trained, None if it does not."""
    if tuple(known) == tuple(told):
        return None
    ours, theirs = _specs(known), _specs(told)
    unlike = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    parts = [
        _listed("it lacks", ours.keys() - theirs.keys()),
        _listed("it has besides", theirs.keys() - ours.keys()),
        _listed("unlike are", [f"{name} ({theirs[name]}, wanted {ours[name]})" for name in unlike]),
    ]
    found = "; ".join(filter(None, parts))
    if not found:
        at = next(k for k, pair in enumerate(zip_longest(known, told)) if pair[0] != pair[1])
        found = f"the same parameters are in other layers, from layer {at} on ({len(told)} layers, wanted {len(known)})"
    return f"this is not the model that is trained here: {found}; give all clusters the same model and grouping"


def _specs(layers: Sequence[Layer]) -> dict[str, str]:
    parameters = chain.from_iterable(layer.parameters for layer in layers)
    return {one.name: f"{list(one.shape)} {one.dtype}" for one in parameters}


def _listed(what: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{what} {', '.join(ordered[:_SHOWN])}{more}" if ordered else ""


def speaker_problem(kind: str, name: str, event: OuterEvent) -> str | None:
    """Return why a member may not say this, None if it may: each speaks for itself alone.

    >>> speaker_problem("cluster", "a", on.PullAsked(cluster="b"))
    'a, a cluster, cannot say PullAsked: only b can'
    """
    if isinstance(event, on.Ticked):
        return f"{name} cannot say what time it is for the master"
    if (kind, name) not in event.speakers:
        who = " or ".join(sorted({speaker for _, speaker in event.speakers}))
        return f"{name}, a {kind}, cannot say {type(event).__name__}: only {who} can"
    if isinstance(event, on.ClusterRegistered):
        foreign = [worker for worker in event.workers if worker != name and not worker.startswith(f"{name}/")]
        return _listed(f"the workers of {name} are named {name} or {name}/..., not", foreign) or None
    return None
