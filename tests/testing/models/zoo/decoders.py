"""Decoders of the transformers library: a mask, labels, and the cache that they have by default."""

from typing import Any

import torch
import transformers
from torch import Tensor

SAMPLES, TOKENS, WORDS = 6, 12, 48
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
LATENT = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
STATES = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip


def _batch() -> dict[str, Tensor]:
    """Windows of text, packed: none of them is padded."""
    tokens = torch.randint(3, WORDS, (SAMPLES, TOKENS))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _padded_batch() -> dict[str, Tensor]:
    """Texts of unlike lengths, whose padding is not counted."""
    made = _batch()
    for sample, length in ((1, 7), (3, 10), (4, 5)):
        made["input_ids"][sample, length:] = 2
        made["attention_mask"][sample, length:] = 0
        made["labels"][sample, length:] = -100
    return made


def _causal(kind: str, sizes: dict[str, Any], **more: Any) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    configuration = getattr(transformers, f"{kind}Config")(**{**sizes, **more})
    name = f"{kind}ForCausalLM"
    return getattr(transformers, name)(configuration), _batch()


def llama():
    return _causal("Llama", GROUPED)


def llama_padded():
    return llama()[0], _padded_batch()


def llama_without_a_mask():
    model, made = llama()
    del made["attention_mask"]
    return model, made


def qwen2():
    return _causal("Qwen2", SIZES, num_key_value_heads=2, tie_word_embeddings=True)


def qwen3():
    return _causal("Qwen3", GROUPED)


def mistral():
    return _causal("Mistral", GROUPED, sliding_window=4)


def mixtral():
    return _causal("Mixtral", GROUPED, num_local_experts=4, num_experts_per_tok=2)


def mixtral_balanced():
    """With the loss of its routers, which reads the mask."""
    more = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "router_jitter_noise": 0.0}
    made = transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, **more)
    return transformers.MixtralForCausalLM(made), _padded_batch()


def qwen2_moe():
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 4}
    return _causal("Qwen2Moe", SIZES, num_key_value_heads=2, num_experts_per_tok=2, **sizes)


def qwen3_moe():
    return _causal("Qwen3Moe", GROUPED, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)


def qwen3_moe_balanced():
    """With the loss of its routers."""
    more = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    return _causal("Qwen3Moe", GROUPED, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, **more)


def gemma():
    return _causal("Gemma", GROUPED)


def gemma2():
    return _causal("Gemma2", GROUPED, sliding_window=4, query_pre_attn_scalar=8)


def gemma3():
    configuration = transformers.Gemma3TextConfig(**GROUPED, sliding_window=4, query_pre_attn_scalar=8)
    return transformers.Gemma3ForCausalLM(configuration), _batch()


def phi():
    return _causal("Phi", SIZES)


def phi3():
    return _causal("Phi3", SIZES, num_key_value_heads=2)


def gpt2():
    configuration = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=4, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(configuration), _batch()


def gpt_neo():
    kinds = [[["global", "local"], 2]]
    sizes = {"num_layers": 4, "num_heads": 4, "attention_types": kinds, "window_size": 4}
    return _causal("GPTNeo", SIZES, **sizes)


def gpt_neox():
    return _causal("GPTNeoX", SIZES)


def gptj():
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "rotary_dim": 4, "vocab_size": WORDS}
    return _causal("GPTJ", sizes)


def opt():
    return _causal("OPT", SIZES, ffn_dim=48, word_embed_proj_dim=32)


def bloom():
    return _causal("Bloom", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4})


def falcon():
    return _causal("Falcon", SIZES)


def falcon_with_alibi():
    return _causal("Falcon", SIZES, alibi=True, new_decoder_architecture=False)


def stablelm():
    return _causal("StableLm", SIZES, num_key_value_heads=2)


def olmo2():
    return _causal("Olmo2", GROUPED)


def granite():
    return _causal("Granite", SIZES, num_key_value_heads=2)


def smollm3():
    return _causal("SmolLM3", GROUPED)


def deepseek_v2():
    return _causal("DeepseekV2", LATENT)


def deepseek_v3():
    return _causal("DeepseekV3", LATENT)


def gpt_oss():
    return _causal("GptOss", GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)


def mamba():
    return _causal("Mamba", STATES, state_size=4, intermediate_size=64)


def mamba2():
    return _causal("Mamba2", STATES, state_size=4, num_heads=8, head_dim=8, n_groups=2, expand=2, chunk_size=4)


def recurrent_gemma():
    """Keeps what it has computed in an attribute."""
    return _causal("RecurrentGemma", GROUPED, lru_width=32, attention_window_size=8)


def jamba():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2}
    more = {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}
    return _causal("Jamba", SIZES, num_key_value_heads=2, **sizes, **more)


def bamba():
    sizes = {"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
    return _causal("Bamba", SIZES, num_key_value_heads=2, attn_layer_indices=[1, 3], **sizes)


def cohere():
    return _causal("Cohere", SIZES, num_key_value_heads=2)


def glm4():
    return _causal("Glm4", GROUPED, partial_rotary_factor=0.5)


def llama_classifier():
    configuration = transformers.LlamaConfig(**GROUPED, num_labels=3)
    made = _padded_batch()
    made["labels"] = torch.arange(SAMPLES) % 3
    return transformers.LlamaForSequenceClassification(configuration), made
