"""Targets: words and tensors that devices of a run send each other when they exchange parts of a model."""

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from fuzz.messages import altered
from fuzz.mutation import corrupted
from fuzz.target import Target
from spantrain.config.files.json_codec import from_json
from spantrain.core.checkpoint import StoredFile, StoredTensor
from spantrain.core.shares import TensorPart
from spantrain.errors import ConfigError, ProtocolError
from spantrain.runtime.control.data_requests import AskNextStep, FetchRows
from spantrain.runtime.coordinator.batches import BatchQueue
from spantrain.runtime.redistribution.exchange import ExchangeGroup, TensorBlock, place_of
from spantrain.runtime.redistribution.transfer import TensorExchange
from spantrain.runtime.worker.switch import read_held

_PART = TensorPart(full_shape=(6, 5))
_FILE = StoredFile(
    device="evil", sha256="0" * 64, size_bytes=1, tensors={"w": StoredTensor(part=_PART, dtype="float32")}
)
_FILES = {"ours": _FILE, "theirs": _FILE}
_WANTS = {"blocks": {"ours": [{"tensor": "w", "box": box} for box in (["[0:6]", "[0:5]"], ["[1:2]", "[0:3]"])]}}


class _Evil:
    """Says what a case has for each lane."""

    def __init__(self, told: Sequence[torch.Tensor]) -> None:
        self._told = iter(told)

    def send(self, target: str, lane: str, tensor: torch.Tensor) -> None:
        """Take it, and do nothing with it."""

    def receive(self, lane: str) -> torch.Tensor:
        return next(self._told, torch.zeros(0, dtype=torch.uint8))


class _HeldTensors:
    def present(self) -> tuple[str, ...]:
        return ("ours",)

    def read(self, name: str, blocks: Sequence[TensorBlock]) -> list[torch.Tensor]:
        return [torch.zeros(6, 5)[place_of(block.box, _PART)] for block in blocks]


def _words(chance: Random, value: Any) -> torch.Tensor:
    """Packed JSON as a tensor, or another tensor."""
    text = json.dumps(altered(chance, value), default=repr).encode()
    act = chance.random()
    if act < 0.1:
        text = corrupted(chance, text)
    elif act < 0.13:
        text = chance.choice(
            (b"[" * 100_000, b"1" * 5000, b'{"blocks": {"ours": [{"tensor": "w", "box": [1e999]}]}}', b"\xff", b"NaN")
        )
    packed = zlib.compress(text)
    flat = torch.frombuffer(bytearray(packed if act < 0.9 else corrupted(chance, packed) or b" "), dtype=torch.uint8)
    return flat if act < 0.95 else flat.to(chance.choice((torch.bfloat16, torch.int64, torch.bool)))


def _exchange_words(chance: Random) -> list[torch.Tensor]:
    given = torch.zeros(chance.choice((0, 120, 120, 120, 121)), dtype=torch.uint8)
    return [_words(chance, {"files": ["theirs"]}), _words(chance, _WANTS), given]


def _exchange(case: list[torch.Tensor], _folder: Path) -> Mapping[str, torch.Tensor]:
    group = ExchangeGroup(own="a", peers=("evil",), nearness=lambda _peer: 0)
    exchange = TensorExchange(group, {"theirs": _FILE, "ours": _FILE}, _HeldTensors(), _Evil(case))
    return exchange.run({"w": _PART})


def _held_words(chance: Random) -> torch.Tensor:
    held = {"device": "evil", "tensors": {"w": {"part": {"full_shape": [6, 5]}, "dtype": "float32"}}}
    if chance.random() < 0.002:
        return torch.tensor(list(zlib.compress(b" " * 2**26 + b"{}")), dtype=torch.uint8)
    return _words(chance, held)


@cache
def _batches() -> BatchQueue:
    batches = BatchQueue(8)
    batches.give(3, [torch.zeros(8, 5)], torch.zeros(8))
    batches.save_before(4)
    batches.stop()
    return batches


def _question(chance: Random) -> tuple[type[AskNextStep | FetchRows], Any]:
    rows = {"step": 3, "part": chance.choice(("inputs", "labels")), "lo": 0, "hi": 8, "offset": chance.choice((0, 99))}
    kind, value = chance.choice(((FetchRows, rows), (AskNextStep, {"step": 3, "saved": False})))
    return kind, altered(chance, value)


def _ask(case: tuple[type[AskNextStep | FetchRows], Any], _folder: Path) -> object:
    kind, value = case
    return _batches().answer(from_json(kind, value, "a question", error=ProtocolError))


RUNTIME_TARGETS: tuple[Target, ...] = (
    Target(name="runtime-exchange", make=_exchange_words, run=_exchange, refusals=(ProtocolError, ConfigError)),
    Target(
        name="runtime-batches", make=_question, run=_ask, refusals=(ProtocolError,)
    ),
    Target(
        name="runtime-switch", make=_held_words, run=lambda case, _: read_held(case, "evil"), refusals=(ProtocolError,),
        most_bytes=2**28,
    ),
)  # fmt: skip
