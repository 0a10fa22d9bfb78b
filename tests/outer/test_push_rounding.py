"""Pushes in fewer bytes: nothing is lost but for a while, nothing counted twice, and shards take only what was said."""

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.outer import commands as do
from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.outer.layers import PIECE_NUMBERS, Layer, ParameterSpec
from spantrain.errors import ProtocolError
from spantrain.formats.registry import WireFormat
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.shard.numerics import round_push, unrounded
from testing.outer.clients import MadeUpServer, alone, close, small_model, train_step
from testing.outer.rounds import MadeUpRounds, layers_of, random_tensors
from testing.patience import PATIENCE_S

ROUNDED = tuple(one for one in WireFormat if one is not WireFormat.NATIVE)
OFF_BY = {WireFormat.FLOAT16: 2**-11, WireFormat.BFLOAT16: 2**-8, WireFormat.INT8: 1 / 253, WireFormat.INT4: 1 / 13.9}
PUSH = Ticket(1, 99)
any_format = pytest.mark.parametrize("wire_format", ROUNDED, ids=str)


def numbers(count: int, seed: int, *, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def there(spec: ParameterSpec, wire_format: WireFormat, sent: torch.Tensor) -> torch.Tensor:
    return unrounded(spec, wire_format, sent, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)))


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 400), st.sampled_from(ROUNDED), st.integers(1, 6), st.integers(0, 99), st.floats(1e-6, 1e3))
def test_what_was_sent_is_what_was_learned_but_for_what_the_last_push_left(count, wire_format, pushes, seed, scale):
    spec = ParameterSpec(name="w", shape=(count,))
    learned, arrived = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    left: torch.Tensor | None = None
    for k in range(pushes):
        start, now = numbers(count, seed + k, scale=scale), numbers(count, seed + k + 100, scale=scale)
        rest = torch.full((count,), math.nan)
        if spec.sent_as(wire_format) == spec:
            return
        sent = round_push(spec, wire_format, start, now, left, rest)
        assert sent.nbytes == spec.sent_as(wire_format).size_bytes < spec.size_bytes
        assert tuple(sent.shape) == spec.sent_as(wire_format).shape
        learned += (start - now).double()
        arrived += there(spec, wire_format, sent).double()
        left = rest
        assert left.abs().max() <= 1.01 * OFF_BY[wire_format] * (start - now).abs().max() * 1.2
    torch.testing.assert_close(arrived + left.double(), learned, rtol=0, atol=1e-5 * scale * pushes)


@any_format
@pytest.mark.parametrize("count", [PIECE_NUMBERS - 1, PIECE_NUMBERS, 2 * PIECE_NUMBERS + 67])
def test_a_large_parameter_goes_in_pieces(wire_format, count):
    spec = ParameterSpec(name="w", shape=(count,))
    wanted, rest = numbers(count, 1), torch.empty(count)
    sent = round_push(spec, wire_format, wanted, torch.zeros(count), None, rest)
    assert sent.nbytes == spec.sent_as(wire_format).size_bytes
    found = there(spec, wire_format, sent)
    assert (found - wanted).abs().max() <= OFF_BY[wire_format] * wanted.abs().max()
    assert torch.equal(found + rest, found + (wanted - found))


@any_format
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_of_half_precision_lose_nothing_either(wire_format, dtype):
    spec = ParameterSpec(name="w", shape=(300,), dtype=dtype)
    start, now = (numbers(300, seed).to(getattr(torch, dtype)) for seed in (1, 2))
    if spec.sent_as(wire_format) == spec:
        assert wire_format in (WireFormat.BFLOAT16, WireFormat.FLOAT16)
        return
    rest = torch.empty(300)
    found = there(spec, wire_format, round_push(spec, wire_format, start, now, None, rest))
    assert found.dtype == start.dtype
    torch.testing.assert_close(found.float() + rest, (start - now).float())


@any_format
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_so_and_leaves_nothing(wire_format, bad):
    spec, start = ParameterSpec(name="w", shape=(100,)), numbers(100, 3)
    start[7] = bad
    rest = torch.empty(100)
    found = there(spec, wire_format, round_push(spec, wire_format, start, torch.zeros(100), None, rest))
    assert not found[7].isfinite()
    assert rest.isfinite().all()
    assert rest[7] == 0


def moved(live: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    step = random_tensors(seed, scale=0.1)
    for name, one in live.items():
        one.sub_(step[name])
    return step


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from(["train", "push", "count", "leave out", "skip", "pull", "others"]), max_size=25),
    st.sampled_from(ROUNDED),
)
def test_faulted_rounds_neither_lose_nor_double_what_was_left_over(happenings, wire_format):
    """A server that adds what it is told is counted; with what is left over it holds all steps, each once."""
    live, server = random_tensors(0), random_tensors(0)
    specs = tuple(one for layer in layers_of(live) for one in layer.parameters)
    copy, steps = ClusterCopy(live), {name: torch.zeros_like(one) for name, one in live.items()}
    pushed: Any = None
    for k, happens in enumerate([*happenings, "skip", "push", "count"]):
        if happens in ("train", "others"):
            into = live if happens == "train" else server
            steps = {name: steps[name] + one for name, one in moved(into, k).items()}
        elif happens == "push" and pushed is None:
            sent = copy.take().tensors(specs, wire_format)
            pushed = {
                one.name: there(one, wire_format, sent[one.name]) if one.sent_as(wire_format) != one else sent[one.name]
                for one in specs
            }
        elif happens == "skip" and pushed is not None:
            pushed = None
            copy.skipped()
        elif happens == "count" and pushed is not None:
            server = {name: one - pushed[name] for name, one in server.items()}
            copy.pulled({name: one.clone() for name, one in server.items()}, counted=True)
            pushed = None
        elif happens == "leave out" and pushed is not None:
            copy.pulled({name: one.clone() for name, one in server.items()}, counted=True, left_out=True)
            assert not copy.take().left
            copy.skipped()
            return
        elif happens == "pull":
            copy.pulled({name: one.clone() for name, one in server.items()}, counted=False)
    left = copy.take().left
    for name, one in server.items():
        held = one - left[name] if name in left else one
        torch.testing.assert_close(held, random_tensors(0)[name] - steps[name], rtol=0, atol=1e-4)
        torch.testing.assert_close(live[name], one, rtol=0, atol=1e-4)


def test_a_format_that_is_switched_off_again_gives_what_was_left_over():
    live = {"w": torch.zeros(200)}
    copy, spec = ClusterCopy(live), ParameterSpec(name="w", shape=(200,))
    live["w"] -= numbers(200, 1)
    first = there(spec, WireFormat.INT4, copy.take().tensors((spec,), WireFormat.INT4)["w"])
    copy.pulled({"w": -first}, counted=True)
    exact = copy.take().tensors((spec,))["w"]
    torch.testing.assert_close(first + exact, numbers(200, 1), rtol=0, atol=1e-6)
    copy.pulled({"w": -first - exact}, counted=True)
    assert not copy.take().left


@any_format
def test_a_shard_takes_what_was_announced_and_measures_what_it_comes_to(wire_format):
    made = MadeUpRounds(random_tensors(0), "a", shards=1)
    shard, layer = made.shards["s0"], made.layout.layers[0]
    taken = ClusterCopy(random_tensors(3)).take()
    spoken = taken.tensors(layer.parameters, wire_format)
    with pytest.raises(ProtocolError, match=r"0\.\w+: got float32 of shape .*, wanted (uint8|bfloat16) of shape"):
        shard.take(PUSH, 0, taken.tensors(layer.parameters), wire_format)
    with pytest.raises(ProtocolError, match=r"0\.\w+: got (uint8|bfloat16) of shape .*, wanted float32"):
        shard.take(PUSH, 0, spoken)
    answer = shard.on_command(do.CheckPush(shard="s0", push=PUSH, reason="test"))
    assert answer is not None
    assert not answer.complete
    shard.take(PUSH, 0, spoken, wire_format)
    held = shard._pushes[PUSH][0]
    assert shard._sums[PUSH][0] == sum(float(one.double().square().sum()) for one in held.values())
    assert {name: one.dtype for name, one in held.items()} == {one.name: torch.float32 for one in layer.parameters}


def test_a_cluster_is_told_that_its_push_was_left_out():
    made = MadeUpRounds(random_tensors(0), "ab", shards=2)
    told: dict[str, bool] = {}
    inner = made._do

    def note(command: Any) -> Any:
        if isinstance(command, do.StartPull):
            told[command.cluster] = command.left_out
        return inner(command)

    made._do = note  # type: ignore[method-assign]
    spoiled = random_tensors(1)
    spoiled["3.weight"][0, 0] = math.nan
    made.push("a", spoiled, tokens=10)
    made.push("b", random_tensors(2, scale=0.1), tokens=10)
    assert told == {"a": True, "b": False}
    made.push("a", random_tensors(3, scale=0.1), tokens=10)
    made.push("b", random_tensors(4, scale=0.1), tokens=10)
    assert told == {"a": False, "b": False}


def test_codes_are_no_parameters():
    codes = ParameterSpec(name="w", shape=(3,), dtype="uint8")
    with pytest.raises(ValueError, match="must be of bfloat16, float16, float32, float64, got w: uint8"):
        Layer(name="0", parameters=(codes,))


@pytest.mark.parametrize("wire_format", [WireFormat.BFLOAT16, WireFormat.INT8], ids=str)
@pytest.mark.parametrize("fault", [None, do.AcceptPush, do.Combine])
def test_a_training_loop_with_rounded_pushes_ends_where_it_would(wire_format, fault):
    """Also when the cluster's network fails in the middle of a push: shards lack what was left over, and no more."""
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = OuterSettings(clip_norm=None, grace_s=0.0, push_format=wire_format)
    moves = []
    struck = [False]
    with ExitStack() as stack:
        server = stack.enter_context(MadeUpServer(settings=settings))

        def hook(command: Any) -> bool:
            if isinstance(command, do.Move) and command.way is TransferWay.PUSH:
                moves.append(command.transfer)
            if fault and isinstance(command, fault) and len(moves) > 2 and not struck[0]:
                struck[0] = True
                server.cut("a")
                server.post(lambda: server.mend("a"))
            return True

        server.do(lambda: setattr(server, "hook", hook))
        outer = stack.enter_context(server.optimizer(model.named_parameters(), "a"))
        for number in range(12):
            train_step(model, inner, number)
            outer.step(tokens=8)
        assert outer.finish(PATIENCE_S)
        assert struck[0] == (fault is not None)
        close(dict(model.named_parameters()), server.parameters, by=0.0)
        close(server.parameters, alone(12), by=0.02)
        assert server.master.state.leading.clusters["a"].tokens == 96
    first, rest = moves[:2], moves[2:]
    whole = {one.layer: one.size_bytes for one in first}
    assert {one.wire_format for one in first} == {WireFormat.NATIVE}, "first parameters are exact"
    assert {one.wire_format for one in rest} == {wire_format}
    assert all(one.size_bytes <= 0.55 * whole[one.layer] for one in rest)
