"""Devices exchange parts of tensors over mailboxes: all get what they want, and what is wrong is named."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import pytest
import torch

from spantrain.core.checkpoint import StoredFile, StoredTensor
from spantrain.core.messages import ControlKey
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.errors import ConfigError, Interrupted, ProtocolError
from spantrain.runtime.channels import MailboxChannel
from spantrain.runtime.redistribution.exchange import ExchangeGroup, TensorBlock, place_of
from spantrain.runtime.redistribution.transfer import TensorExchange
from spantrain.runtime.words import packed_words
from testing.memory_mailbox import MemoryNetwork
from testing.patience import PATIENCE_S
from testing.runtime.parts import dealt, put, taken

pytestmark = pytest.mark.checkpoint

SHAPES = {"w": (6, 5), "b": (7,), "step": (), "big": (1500, 1000), "none": (0, 2)}
DTYPES = {"w": torch.float32, "b": torch.bfloat16, "step": torch.float32, "big": torch.float32, "none": torch.uint8}


class Shelf:
    """Files in memory: a source that counts what is read."""

    def __init__(self, files: Mapping[str, Mapping[str, torch.Tensor]], parts: Mapping[str, StoredFile]) -> None:
        self.files = files
        self.parts = parts
        self.reads: list[TensorBlock] = []

    def present(self) -> tuple[str, ...]:
        return tuple(sorted(self.files))

    def read(self, name: str, blocks: Sequence[TensorBlock]) -> list[torch.Tensor]:
        self.reads += blocks
        stored = self.parts[name].tensors
        return [self.files[name][b.tensor][place_of(b.box, stored[b.tensor].part)] for b in blocks]


def full_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(DTYPES[name]) for name, shape in SHAPES.items()}


def stored_file(parts: Mapping[str, TensorPart]) -> StoredFile:
    tensors = {name: StoredTensor(part=p, dtype=str(DTYPES[name])[6:]) for name, p in parts.items()}
    return StoredFile(device="writer", sha256="0" * 64, size_bytes=1, tensors=tensors)


def exchanged(
    shelves: Mapping[str, Shelf],
    files: Mapping[str, StoredFile],
    wanted: Mapping[str, Mapping[str, TensorPart]],
    nearness: Callable[[str], int] = lambda _peer: 0,
) -> dict[str, dict[str, torch.Tensor]]:
    """Run all devices in threads; where one fails the others are told to stop, as a coordinator would."""
    network = MemoryNetwork()
    names = sorted(shelves)
    boxes = {name: network.mailbox(name) for name in names}
    failed: list[str] = []

    def check_abort() -> None:
        if failed:
            raise Interrupted(failed[0])

    def run(name: str) -> dict[str, torch.Tensor]:
        boxes[name].set_peers(1, [box.address for box in boxes.values()])
        post = MailboxChannel(boxes[name], generation=1, step=0, check_abort=check_abort)
        group = ExchangeGroup(own=name, peers=tuple(peer for peer in names if peer != name), nearness=nearness)
        try:
            return TensorExchange(group, files, shelves[name], post).run(wanted[name])
        except (ConfigError, ProtocolError):
            failed.append(name)
            raise

    with ThreadPoolExecutor(len(names)) as pool:
        futures = {name: pool.submit(run, name) for name in names}
        ended = {name: future.exception(PATIENCE_S) for name, future in futures.items()}
    for error in ended.values():
        if error is not None and not isinstance(error, Interrupted):
            raise error
    return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("seed", range(6))
def test_everybody_gets_what_it_wants(seed):
    """Files dealt to some devices at random; a tensor of six megabytes takes several messages."""
    random = Random(seed)
    full = full_tensors()
    written, devices = random.randint(1, 4), random.randint(1, 4)
    parts = dealt(SHAPES, written, random)
    files = {f"f{number}": stored_file(one) for number, one in enumerate(parts)}
    names = [f"d{number}" for number in range(devices)]
    on_disk: dict[str, dict[str, dict[str, torch.Tensor]]] = {name: {} for name in names}
    for number, one in enumerate(parts):
        for name in random.sample(names, random.randint(1, devices)):
            on_disk[name][f"f{number}"] = {tensor: taken(full[tensor], part) for tensor, part in one.items()}
    shelves = {name: Shelf(on_disk[name], files) for name in names}
    wanted = dict(zip(names, dealt(SHAPES, devices, random), strict=True))
    got = exchanged(shelves, files, wanted)
    back = {name: torch.zeros(shape).to(DTYPES[name]) for name, shape in SHAPES.items()}
    for name in names:
        for tensor, part in wanted[name].items():
            assert torch.equal(got[name][tensor], taken(full[tensor], part)), (name, tensor)
            put(back[tensor], part, got[name][tensor])
    assert all(torch.equal(back[name], full[name]) for name in full)


def test_what_lies_here_is_not_sent_for():
    full = {"w": torch.randn(6, 5)}
    whole = {"w": TensorPart(full_shape=(6, 5))}
    files = {"f": stored_file(whole)}
    shelves = {name: Shelf({"f": full}, files) for name in "ab"}
    exchanged(shelves, files, {"a": whole, "b": {}})
    assert len(shelves["a"].reads) == 1
    assert shelves["b"].reads == []


def test_several_files_of_one_device_are_told_apart_whatever_is_wanted_first():
    """Files of as many bytes: nothing else would tell that they were taken for each other."""
    full = {**full_tensors(), "w": torch.randn(7).to(torch.bfloat16)}
    whole = {name: taken_whole(full[name]) for name in ("w", "b")}
    files = {"f0": stored_file({"b": whole["b"]}), "f1": stored_file({"w": whole["w"]})}
    files["f1"] = replace(files["f1"], tensors={"w": StoredTensor(part=whole["w"], dtype="bfloat16")})
    here = Shelf({"f0": {"b": full["b"]}, "f1": {"w": full["w"]}}, files)
    for first, second in (("w", "b"), ("b", "w")):
        wanted = {"a": {}, "b": {first: whole[first], second: whole[second]}}
        got = exchanged({"a": here, "b": Shelf({}, files)}, files, wanted)
        assert torch.equal(got["b"]["w"], full["w"])
        assert torch.equal(got["b"]["b"], full["b"])


def taken_whole(tensor: torch.Tensor) -> TensorPart:
    """Return all of a tensor of one dimension."""
    return TensorPart(full_shape=tuple(tensor.shape), dim=0, ranges=(Span(0, tensor.shape[0]),))


def test_the_nearest_is_asked():
    full = {"w": torch.randn(6, 5)}
    whole = {"w": TensorPart(full_shape=(6, 5))}
    files = {"f": stored_file(whole)}
    shelves = {"a": Shelf({}, files), "b": Shelf({"f": full}, files), "c": Shelf({"f": full}, files)}
    exchanged(shelves, files, {"a": whole, "b": {}, "c": {}}, nearness=lambda peer: {"b": 2}.get(peer, 0))
    assert (len(shelves["b"].reads), len(shelves["c"].reads)) == (0, 1)


def test_a_file_on_no_machine_is_named():
    whole = {"w": TensorPart(full_shape=(6, 5))}
    files = {"f": stored_file(whole)}
    shelves = {name: Shelf({}, files) for name in "ab"}
    with pytest.raises(ConfigError, match=r"lacks w for device b: not on any machine of this run: f \(device writer"):
        exchanged(shelves, files, {"a": {}, "b": whole})


class Forged:
    """A way of messages on which one lane says something else."""

    def __init__(self, lane: str, content: object) -> None:
        self._lane = lane
        self._content = content

    def send(self, target: str, lane: str, tensor: torch.Tensor) -> None:
        pass

    def receive(self, lane: str) -> torch.Tensor:
        words: object = {"files": []} if "have" in lane else {"blocks": {}}
        if lane.startswith(self._lane):
            words = self._content
        if isinstance(words, torch.Tensor):
            return words
        return packed_words(words)


def asked(file: str, tensor: str, *box: str) -> object:
    return {"blocks": {file: [{"tensor": tensor, "box": list(box)}]}}


@pytest.mark.parametrize(
    ("lane", "content", "says"),
    [
        ("exchange-have", {"f": 1}, "b says what it has: "),
        ("exchange-have", torch.tensor([255, 254], dtype=torch.uint8), "cannot be unpacked"),
        ("exchange-have", torch.tensor(list(zlib.compress(b"\xff")), dtype=torch.uint8), "no JSON"),
        ("exchange-want", asked("../secret", "w", "[0:6]", "[0:5]"), "not here"),
        ("exchange-want", asked("f", "other", "[0:6]"), "does not hold"),
        ("exchange-want", asked("f", "w", "[0:7]", "[0:5]"), "does not hold"),
        ("exchange-want", asked("f", "w", "[5:2]", "[0:5]"), "needs 0 <= lo < hi"),
        ("exchange-want", asked("f", "w", "[0:6]"), "does not hold"),
        ("exchange-want", ["f"], "b asks for what it lacks: "),
    ],
)
def test_a_peer_that_asks_for_what_is_not_there_is_refused(lane, content, says):
    whole = {"w": TensorPart(full_shape=(6, 5))}
    files = {"f": stored_file(whole)}
    group = ExchangeGroup(own="a", peers=("b",), nearness=lambda _peer: 0)
    exchange = TensorExchange(group, files, Shelf({"f": {"w": torch.zeros(6, 5)}}, files), Forged(lane, content))
    with pytest.raises(ProtocolError, match=says):
        exchange.run({})


def test_a_peer_that_sends_another_size_is_refused():
    class Short(Forged):
        def receive(self, lane: str) -> torch.Tensor:
            if "give" in lane:
                return torch.zeros(3, dtype=torch.uint8)
            return super().receive(lane)

    whole = {"w": TensorPart(full_shape=(6, 5))}
    files = {"f": stored_file(whole)}
    group = ExchangeGroup(own="a", peers=("b",), nearness=lambda _peer: 0)
    exchange = TensorExchange(group, files, Shelf({}, files), Short("exchange-have", {"files": ["f"]}))
    with pytest.raises(ProtocolError, match="wanted 120 bytes"):
        exchange.run(whole)


@pytest.mark.parametrize(
    ("step", "tensors", "told"), [(1, 1, "with 1 tensors"), (0, 0, "with 0 tensors"), (0, 2, "2 tensors")]
)
def test_a_message_that_is_no_part_of_an_exchange_is_named(step, tensors, told):
    network = MemoryNetwork()
    a, b = (network.mailbox(name) for name in "ab")
    for box in (a, b):
        box.set_peers(1, [a.address, b.address])
    b.send("a", ControlKey(1, step, "x"), [torch.ones(1)] * tensors)
    with pytest.raises(ProtocolError, match=f"b sent .* {told} in the middle of an exchange of step 0"):
        MailboxChannel(a, generation=1, step=0).receive("x")
