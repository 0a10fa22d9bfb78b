"""What a cut's wire format does to tensors, there and back."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.plan import WireFormat
from spantrain.runtime.rounding import for_wire, from_wire

NUMBERS = st.builds(lambda digits, power: digits * 2.0**power, st.integers(-(2**24), 2**24), st.integers(-90, 90))


@settings(deadline=None, max_examples=60)
@given(values=st.lists(NUMBERS, min_size=1, max_size=8))
def test_rounding_keeps_each_number_but_for_its_last_bits(values):
    tensor = torch.tensor(values)
    (sent,) = for_wire((tensor,), WireFormat.BFLOAT16)
    (back,) = from_wire((sent,), WireFormat.BFLOAT16)
    assert (sent.dtype, back.dtype) == (torch.bfloat16, torch.float32)
    assert sent.element_size() * 2 == tensor.element_size()
    assert bool(((back - tensor).abs() <= 2.0**-8 * tensor.abs()).all())
    # What has been rounded passes unchanged.
    assert torch.equal(for_wire((back,), WireFormat.BFLOAT16)[0], sent)


def test_other_types_and_exact_cuts_pass_as_they_are():
    tokens, half = torch.arange(4), torch.ones(4, dtype=torch.float16)
    assert for_wire((tokens, half), WireFormat.BFLOAT16) == (tokens, half)
    assert from_wire((tokens, half), WireFormat.BFLOAT16) == (tokens, half)
    tensors = (torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert for_wire(tensors, WireFormat.NATIVE) is from_wire(tensors, WireFormat.NATIVE) is tensors
