"""Models of the library that nobody edited, cut into units and then divided: tied embeddings, crossing positions."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from spantrain.core.span import Span
from spantrain.models.build import build_units, example_inputs, example_rows, unit_source
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.sources import hf_spec
from spantrain.models.tensor_parallel.shard import notices, sums_of
from spantrain.models.units import LABELS
from testing.models.divided_units import Work, assert_like_whole
from testing.models.zoo.trial import FOLDER

pytestmark = pytest.mark.tensor_parallel

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "num_attention_heads": 6,
    "num_key_value_heads": 3, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 256,
    "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip
_T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 24, "d_kv": 4, "num_heads": 6,
    "d_ff": 20, "num_layers": 2, "vocab_size": 256, "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
_CONFIGURATIONS: Mapping[str, Mapping[str, object]] = MappingProxyType({"llama": _LLAMA, "t5": _T5})
_SUMS = MappingProxyType({"llama": [1, 2, 1], "t5": [1, 2, 2, 4, 3, 1]})


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slices"])
@pytest.mark.parametrize("name", _CONFIGURATIONS)
def test_an_unedited_model_in_parts_trains_as_the_whole_does(
    name: str, sequence_parallel: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(_CONFIGURATIONS[name])))
    spec = hf_spec(f"hf:{tmp_path}", sequence_length=8)
    generator = torch.Generator().manual_seed(1)
    inputs = tuple(torch.randint(0, 256, tensor.shape, generator=generator) for tensor in example_inputs(spec, 4))
    labels = torch.randint(0, 256, example_rows(spec, 4)[LABELS].shape, generator=generator)
    work = Work(inputs=inputs, labels=labels, spans=(Span(0, 3), Span(3, 4)), order="FIW", is_first=True)
    assert [sums_of(unit) for unit in build_units(spec, seed=3)] == _SUMS[name]
    members = assert_like_whole(lambda: build_units(spec, seed=3), work, (2, 1), sequence_parallel=sequence_parallel)
    assert sequence_parallel == any(text.startswith("reduce_scatter") for text in members[0].operations)
    assert notices(members[0].units) == ()


@pytest.mark.parametrize("name", ["torch_attention", "torch_transformer"])
def test_torchs_attention_drops_in_parts_what_the_whole_drops(name: str) -> None:
    spec = resolve_model(f"{FOLDER / 'plain'}.py:{name}")
    batch = unit_source(spec).batch().resized(4)
    spans = Span(0, 3), Span(3, 4)
    work = Work(inputs=batch.inputs, labels=batch.labels, spans=spans, order="FIW", is_first=True)
    members = assert_like_whole(lambda: build_units(spec, seed=3), work, (3, 1))
    assert any(type(part).__name__ == "DividedHeads" for unit in members[0].units for part in unit.modules())
