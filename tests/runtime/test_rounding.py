"""What a cut's wire format does to tensors, there and back."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.units import TensorSpec, Unit
from spantrain.errors import ProtocolError
from spantrain.formats.codec import BlockCodec
from spantrain.formats.registry import WireFormat
from spantrain.runtime.step.rounding import ErrorFeedback, for_wire, from_wire

NUMBERS = st.builds(lambda digits, power: digits * 2.0**power, st.integers(-(2**24), 2**24), st.integers(-90, 90))
IN_ROWS = [one for one in WireFormat if isinstance(one.codec, BlockCodec)]
STEP = {WireFormat.INT8: 1 / 253, WireFormat.INT4: 1 / 13.9}
"""How far off a number may be, as a part of the largest one of its block."""


def there_and_back(tensor, wire_format):
    (sent,) = for_wire((tensor,), wire_format)
    (back,) = from_wire((sent,), wire_format)
    assert back.shape == tensor.shape
    return sent, back


def random_tensor(shape, seed, power=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**power


shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).filter(lambda sizes: 8 <= math.prod(sizes) <= 3000)


@settings(deadline=None, max_examples=60)
@given(values=st.lists(NUMBERS, min_size=1, max_size=8))
def test_rounding_keeps_each_number_but_for_its_last_bits(values):
    tensor = torch.tensor(values)
    sent, back = there_and_back(tensor, WireFormat.BFLOAT16)
    assert (sent.dtype, back.dtype) == (torch.bfloat16, torch.float32)
    assert sent.element_size() * 2 == tensor.element_size()
    assert bool(((back - tensor).abs() <= 2.0**-8 * tensor.abs()).all())
    # What has been rounded passes unchanged.
    assert torch.equal(for_wire((back,), WireFormat.BFLOAT16)[0], sent)


@settings(deadline=None, max_examples=60)
@given(shape=shapes, seed=st.integers(0, 99), power=st.integers(-90, 90))
def test_float16_keeps_each_number_but_for_its_last_bits_at_any_size(shape, seed, power):
    tensor = random_tensor((3, *shape), seed, power)
    _, back = there_and_back(tensor, WireFormat.FLOAT16)
    # A number 2^28 times smaller than the sample's largest has fewer bits.
    largest = tensor.flatten(1).abs().amax(1).reshape(-1, *[1] * len(shape))
    assert bool(((back - tensor).abs() <= 2.0**-11 * tensor.abs() + 2.0**-38 * largest).all())
    assert torch.equal(there_and_back(back, WireFormat.FLOAT16)[1], back)


@settings(deadline=None, max_examples=100)
@given(
    wire_format=st.sampled_from([WireFormat.INT8, WireFormat.INT4]),
    samples=st.integers(1, 4),
    shape=shapes,
    seed=st.integers(0, 99),
    power=st.integers(-90, 90),
)
def test_a_number_is_off_by_half_a_step_of_its_block_at_most(wire_format, samples, shape, seed, power):
    tensor = random_tensor((samples, *shape), seed, power)
    _, back = there_and_back(tensor, wire_format)
    rows = zip(tensor.flatten(1), back.flatten(1), strict=True)
    for block, found in ((a, b) for row, got in rows for a, b in blocks_of(row, got, wire_format)):
        assert float((block - found).abs().max()) <= STEP[wire_format] * float(block.abs().max())


def blocks_of(row, got, wire_format):
    return zip(row.split(wire_format.codec.block_numbers), got.split(wire_format.codec.block_numbers), strict=True)


@settings(deadline=None, max_examples=100)
@given(
    wire_format=st.sampled_from(WireFormat),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool"]),
    samples=st.integers(1, 5),
    shape=st.lists(st.integers(1, 30), max_size=3).map(tuple),
)
def test_as_many_bytes_are_sent_as_the_model_says(wire_format, dtype, samples, shape):
    tensor = (4 * random_tensor((samples, *shape), 0)).abs().to(getattr(torch, dtype))
    size_bytes = math.prod(shape) * tensor.element_size()
    spec = TensorSpec(name="x", shape_per_sample=shape, dtype=dtype, bytes_per_sample=size_bytes)
    unit = Unit(
        name="u",
        unit_class="U",
        parameter_bytes=0,
        forward_flop_per_sample=0.0,
        outputs=(spec,),
        activation_bytes_per_sample=size_bytes,
    )
    sent, back = there_and_back(tensor, wire_format)
    assert sent.nbytes == samples * unit.forward_bytes(wire_format) == samples * unit.backward_bytes(wire_format)
    assert sent.shape[0] == samples
    if wire_format is not WireFormat.BFLOAT16:
        assert back.dtype == tensor.dtype
    if wire_format is WireFormat.NATIVE or dtype not in ("float32", "bfloat16", "float16"):
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("wire_format", IN_ROWS)
def test_rows_may_be_cut_and_put_together_between_samples(wire_format):
    tensor = random_tensor((6, 7, 30), 1)
    sent, back = there_and_back(tensor, wire_format)
    again = torch.cat([from_wire((sent[lo:hi],), wire_format)[0] for lo, hi in ((0, 1), (1, 4), (4, 6))])
    assert torch.equal(again, back)
    assert torch.equal(from_wire((torch.cat((sent[2:], sent[:2])),), wire_format)[0][4:], back[:2])


@pytest.mark.parametrize("wire_format", list(WireFormat))
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_arrives_so(wire_format, bad):
    tensor = random_tensor((3, 300), 1)
    tensor[1, 137] = bad
    _, back = there_and_back(tensor, wire_format)
    assert not bool(back[1, 137].isfinite())
    assert bool(back[[0, 2]].isfinite().all())
    # Each way of writing "not a number" is one.
    payload = torch.full((1, 300), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert bool(there_and_back(payload, wire_format)[1].isnan().all())


@pytest.mark.parametrize("wire_format", list(WireFormat))
def test_the_largest_the_smallest_and_nothing_stay_finite(wire_format):
    tensor = torch.zeros(4, 300)
    tensor[1], tensor[2], tensor[3, ::2] = 3.3e38, 1e-40, -3.3e38
    _, back = there_and_back(tensor, wire_format)
    assert bool(back.isfinite().all())
    assert float(back[0].abs().max()) == 0.0
    assert torch.allclose(back, tensor, rtol=0.01, atol=1e-37)


def test_other_types_and_exact_cuts_pass_as_they_are():
    tokens, half = torch.arange(4), torch.ones(4, dtype=torch.float16)
    for wire_format in WireFormat:
        assert for_wire((tokens, half), wire_format) == (tokens, half)
        assert from_wire((tokens, half), wire_format) == (tokens, half)
    tensors = (torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert for_wire(tensors, WireFormat.NATIVE) is from_wire(tensors, WireFormat.NATIVE) is tensors


def test_bytes_that_are_no_rows_are_refused():
    (sent,) = for_wire((torch.ones(2, 64),), WireFormat.INT8)
    with pytest.raises(ProtocolError, match=r"bytes long, wanted"):
        from_wire((sent[:, 3:],), WireFormat.INT8)
    with pytest.raises(ProtocolError, match=r"bytes long, wanted"):
        from_wire((sent,), WireFormat.INT4)
    for alien in (torch.full((2, 40), 255, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)):
        with pytest.raises(ProtocolError, match=r"do not end as rows do"):
            from_wire((alien,), WireFormat.INT8)


@settings(deadline=None, max_examples=60)
@given(
    wire_format=st.sampled_from([WireFormat.INT8, WireFormat.INT4]),
    spans=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    shape=shapes,
    seed=st.integers(0, 99),
)
def test_errors_of_gradients_cancel_in_their_sum(wire_format, spans, shape, seed):
    """Whatever spans they are sent in, a sum over samples lacks what the last one lost, and no more."""
    feedback = ErrorFeedback()
    gradients = random_tensor((sum(spans), *shape), seed)
    sent = [feedback.for_wire((piece,), wire_format) for piece in gradients.split(spans)]
    arrived = torch.cat([from_wire(rows, wire_format)[0] for rows in sent])
    lost = float((arrived.sum(0) - gradients.sum(0)).abs().max())
    assert lost <= 1.2 * STEP[wire_format] * float(gradients.abs().max()) + 1e-5
    at_once = ErrorFeedback().for_wire((gradients,), wire_format)
    assert torch.equal(torch.cat([rows for (rows,) in sent]), at_once[0])


def test_the_same_gradient_in_every_sample_arrives_on_average():
    gradient = random_tensor((1, 128), 1).expand(64, -1)
    (fed,) = from_wire(ErrorFeedback().for_wire((gradient,), WireFormat.INT4), WireFormat.INT4)
    _, plain = there_and_back(gradient, WireFormat.INT4)
    errors = [float((found.mean(0) - gradient[0]).abs().max()) for found in (fed, plain)]
    assert errors[0] < 0.05 * errors[1]


def test_error_feedback_carries_over_nothing_that_is_not_finite():
    feedback, gradients = ErrorFeedback(), random_tensor((3, 200), 1)
    gradients[0] = float("nan")
    (arrived,) = from_wire(feedback.for_wire((gradients,), WireFormat.INT8), WireFormat.INT8)
    assert arrived[0].isnan().all()
    assert arrived[1:].isfinite().all()
    for fine in (WireFormat.NATIVE, WireFormat.BFLOAT16, WireFormat.FLOAT16):
        assert torch.equal(feedback.for_wire((gradients[1:],), fine)[0], for_wire((gradients[1:],), fine)[0])
