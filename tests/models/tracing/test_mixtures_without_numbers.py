"""A mixture of experts is followed, and its operations are counted, without its weights."""

import pytest
import transformers

from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph

WIDTH, INNER, TOKENS, EXPERTS, CHOSEN = 32, 48, 8, 4, 2
SIZES = {
    "vocab_size": 256, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16, "num_experts_per_tok": CHOSEN,
}  # fmt: skip
KINDS = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "head_dim": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_counted_and_only_one_layer_at_a_time_has_weights(kind, tmp_path, monkeypatch):
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind]})
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the whole model was made")

    monkeypatch.setattr("spantrain.models.tracing.source.load_model", refused)
    graph = build_graph(resolve_model(f"hf:{tmp_path}", sequence_length=TOKENS))
    experts = 2 * TOKENS * CHOSEN * 3 * WIDTH * INNER
    router, projections = 2 * TOKENS * WIDTH * EXPERTS, 2 * TOKENS * 4 * WIDTH * WIDTH
    attention = 2 * 2 * TOKENS * TOKENS * WIDTH
    for unit in graph.units[1:-1]:
        assert unit.forward_flop_per_sample == experts + router + projections + attention
