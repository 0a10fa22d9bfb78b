"""Targets: what members tell the outer optimizer's master, and what it tells a cluster, in any order."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, get_args, get_type_hints

import torch

from fuzz.mutation import changed
from fuzz.target import Target
from fuzz.typed import plain_of
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent
from spantrain.core.outer.layers import divide
from spantrain.errors import SpanTrainError
from spantrain.outer.client.replica import ClusterCopy, TakenPush
from spantrain.outer.client.session import ClientSession
from spantrain.outer.link.codec import decode_command, decode_event, encode_value
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.report import status_of
from spantrain.outer.master.service import MasterService
from spantrain.outer.pipeline import StageWorker
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.transport.control.protocol import decode, encode
from testing.outer.links import LAYERS, WHOLE, cluster_facts, shard_facts

# The master.


class _NoFiles:
    """A folder that keeps nothing."""

    def __init__(self, config: MasterConfig) -> None:
        self._first = config.first_state()

    def load_layout(self, _config: MasterConfig) -> None:
        return None

    def load_state(self, _config: MasterConfig) -> Any:
        return self._first

    def save(self, _kept: Any) -> None:
        pass


_EVENTS = get_args(OuterEvent)
_SPEAKERS = ("s0", "a", "evil", "evil/w")
_OWN = {shard: [kind for kind in _EVENTS if ("shard" in get_type_hints(kind)) == shard] for shard in (False, True)}
"""What shards say, and what clusters do."""
_SEEN = ("push", "update", "pull", "transfer")
"""Fields in whose place a case may have a number: of what the master has said."""
_CONFIG = MasterConfig(
    shards=("s0",), settings=OuterSettings(grace_s=0.0, lost_after_s=100.0), samples=8, chunks=4, encrypted=False
)


def _an_event(chance: Random) -> tuple[str, Any]:
    """Who says it, and an event of its own, often with other numbers in it."""
    speaker = chance.choice(_SPEAKERS)
    kind = chance.choice(_OWN[speaker == "s0"] if chance.random() < 0.9 else _EVENTS)
    value = {"kind": kind.__name__, **plain_of(kind, chance)}
    value.pop("fragment", None)
    value = changed(chance, value) if chance.random() < 0.3 else value
    if isinstance(value, dict):
        value |= {field: speaker for field in ("cluster", "shard") if field in value}
        value |= {field: chance.randrange(9) for field in _SEEN if field in value and chance.random() < 0.8}
    return speaker, value


def _told_to_master(chance: Random) -> list[tuple[str, Any]]:
    return [_an_event(chance) for _ in range(chance.randrange(1, 10))]


def _filled_in(event: Any, seen: Mapping[str, list[Any]]) -> Any:
    if not isinstance(event, dict):
        return event
    known = {field: seen[field] for field in event.keys() & seen.keys() if seen[field]}
    return event | {
        field: one[event[field] % len(one)] for field, one in known.items() if isinstance(event[field], int)
    }


def _note(connection: Any, seen: Mapping[str, list[Any]], fetched: "Counter[int]") -> None:
    """Keep what the master has told a member of pushes, updates, pulls and layers."""
    first, bodies = connection.outbox.take(fetched[connection.number], timeout_s=0.0)
    fetched[connection.number] = first + len(bodies) - 1
    for body in bodies:
        command = decode(body, limit_bytes=2**23).get("command", {})
        for field, one in seen.items():
            if field in command and command[field] not in one:
                one.append(command[field])


def _master(case: list[tuple[str, Any]], _folder: Path) -> object:
    service = MasterService(_CONFIG, _NoFiles(_CONFIG), 0.0)  # type: ignore[arg-type]
    numbers: dict[str, int] = {}
    batches: Counter[str] = Counter()
    fetched: Counter[int] = Counter()
    facts = {"s0": shard_facts(), "a": cluster_facts(), "evil": cluster_facts()}
    first = [
        ("s0", on.ShardRegistered(shard="s0", versions=())),
        ("a", on.ClusterRegistered(cluster="a", workers={"a": WHOLE})),
        ("evil", on.ClusterRegistered(cluster="evil", workers={"evil": WHOLE})),
    ]
    for name, one in facts.items():
        numbers[name], _ = service.enter(0.0, name, one)
    refused: list[SpanTrainError] = []
    seen: dict[str, list[Any]] = {field: [] for field in _SEEN}
    for now_s, (name, event) in enumerate([*first, *case]):
        try:
            told = event if now_s < len(first) else decode_event(_filled_in(event, seen))
            if name in numbers:
                batches[name] += 1
                service.tell(0.1 * now_s, name, numbers[name], batches[name], [told])
        except SpanTrainError as error:
            refused.append(error)
        for member in numbers:
            connection = service.connections.get(member)
            if connection is None:
                numbers[member], _ = service.enter(0.1 * now_s, member, facts[member])
                batches[member] = 0
            else:
                _note(connection, seen, fetched)
        if now_s % 4 == 3:
            service.tick(0.1 * now_s)
    encode({"status": encode_value(status_of(service, address="h:1", now_s=100.0))}, limit_bytes=2**23)
    if refused:
        raise refused[-1]
    return None


# A cluster, and what its master tells it.


class _Ways:
    """A link and a wire that carry nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_values, **_named: None


_COMMANDS = get_args(OuterCommand)
_FOR_CLUSTERS = [kind for kind in _COMMANDS if {"cluster", "transfer"} & get_type_hints(kind).keys()]


def _told_to_cluster(chance: Random) -> list[Any]:
    return [_a_command(chance) for _ in range(chance.randrange(1, 12))]


def _a_command(chance: Random) -> Any:
    kind = chance.choice(_FOR_CLUSTERS if chance.random() < 0.9 else _COMMANDS)
    told = {"kind": kind.__name__, **plain_of(kind, chance)}
    told.pop("fragment", None)
    if "transfer" in told:
        told["transfer"] |= {"worker": chance.choice(("a", "a/w")), "wire_format": "native"}
        told |= {"parameters": chance.random() < 0.5}
    return changed(chance, told) if chance.random() < 0.2 else told


def _cluster(case: list[Any], _folder: Path) -> object:
    """A cluster in the middle of its push, and a pipeline's stage beside it."""
    session, ways = ClientSession("a", LAYERS), _Ways()
    stage = StageWorker(
        "a/w",
        LAYERS,
        (0, 1),
        ClusterCopy({one.name: torch.zeros(one.shape) for layer in LAYERS for one in layer.parameters}),
    )
    layout = divide(LAYERS, ("s0",), fragments=1)
    welcome = MasterWelcome(layout=layout, rule=Nesterov(), settings=OuterSettings(), peers=())
    refused: list[SpanTrainError] = []
    try:
        for one in (session, stage):
            one.connect(ways, ways)
            one.joined(welcome)
        session.ask(TakenPush(start={}, now={}), tokens=3, took_s=0.0)
        for told in case:
            for one in (session, stage):
                try:
                    one.commanded(decode_command(told))
                except SpanTrainError as error:
                    refused.append(error)
            session.take_update()
    finally:
        session.close()
        stage.close()
    if refused:
        raise refused[-1]
    return None


OUTER_TARGETS: tuple[Target, ...] = (
    Target(name="state-master", make=_told_to_master, run=_master, refusals=(SpanTrainError,)),
    Target(name="state-cluster", make=_told_to_cluster, run=_cluster, refusals=(SpanTrainError,)),
)
