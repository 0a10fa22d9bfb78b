"""Small configurations of any class of the transformers library, and batches for what it learns; for benchmarks."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

SAMPLES, TOKENS, WORDS = 6, 12, 48
TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "AUDIO_CLASSIFICATION",
    "CTC",
)  # fmt: skip
"""As the library names its tables of classes."""
_SIZES: Mapping[int, tuple[str, ...]] = {
    WORDS: ("vocab_size",),
    64: (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
        "context_length", "image_size",
    ),
    48: (
        "intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size",
        "mlp_hidden_size", "d_inner", "dim_feedforward", "moe_intermediate_size", "shared_expert_intermediate_size",
    ),
    32: (
        "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "model_dim", "hidden_dim", "emb_dim",
        "d_embed", "n_embed",
    ),
    8: ("head_dim", "d_kv", "kv_channels", "v_head_dim", "global_head_dim", "kv_lora_rank", "q_lora_rank",
        "qk_nope_head_dim", "state_size", "ssm_state_size", "mamba_d_state", "patch_size"),
    4: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
        "num_decoder_layers", "num_encoder_layers", "num_attention_heads", "n_head", "n_heads", "num_heads",
        "encoder_attention_heads", "decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_num_experts", "qk_rope_head_dim", "rotary_dim",
    ),
    2: (
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_experts_per_tok", "moe_topk",
        "num_experts_per_token", "moe_k", "type_vocab_size",
    ),
    1: ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"),
}  # fmt: skip
_BY_DEFAULT_NONE = ("head_dim", "num_key_value_heads")
_WIDTHS = ("hidden_sizes", "embed_dims", "encoder_embed_dims", "widths")
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def classes() -> list[tuple[str, str]]:
    """Return all classes of the library's tables with what each learns, every class once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in TASKS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            for name in names if isinstance(names, tuple | list) else (names,):
                found.setdefault(name, task)
    return list(found.items())


def small_configuration(kind: type[Any]) -> Any:
    """Return a configuration of a kind with few of everything, and its parts' alike; what it says otherwise stays."""
    given = kind().to_dict()
    renamed = getattr(kind, "attribute_map", None) or {}
    changed: dict[str, Any] = {}
    for size, names in _SIZES.items():
        for name in names:
            plain = isinstance(given.get(name), int | float) and not isinstance(given.get(name), bool)
            if name in given and name not in renamed and (plain or (given[name] is None and name in _BY_DEFAULT_NONE)):
                changed[name] = size
    changed |= {name: number for name, number in _SPECIAL.items() if name in given}
    for name in _WIDTHS:
        sizes = given.get(name)
        if isinstance(sizes, list | tuple) and sizes and all(isinstance(size, int) for size in sizes):
            changed[name] = type(sizes)(max(16, 16 * size // max(min(sizes), 1) // 8 * 8) for size in sizes)
    if "kv_lora_rank" in changed:  # heads of latent attention have sizes of their own
        changed["num_key_value_heads"] = changed.get("num_attention_heads", 4)
        changed.pop("head_dim", None)
    if given.get("is_encoder_decoder"):
        changed["decoder_start_token_id"] = 0
    if "apply_spec_augment" in given:  # by random numbers of NumPy's
        changed["apply_spec_augment"] = False
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        inner = type(getattr(kind(), name, None)) if part.__name__ == "AutoConfig" else part
        if inner is not type(None):
            changed[name] = small_configuration(inner).to_dict()
    return kind(**changed)


def batch_for(task: str, configuration: Any) -> dict[str, Tensor]:
    """Return a batch as a class takes it by name, the same each time."""
    torch.manual_seed(3)
    side = getattr(configuration, "image_size", None) or 64
    side = side[0] if isinstance(side, list | tuple) else side
    tokens = torch.randint(3, WORDS, (SAMPLES, TOKENS))
    text = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    labels = getattr(configuration, "num_labels", 2)
    picture = {"pixel_values": torch.randn(SAMPLES, getattr(configuration, "num_channels", 3) or 3, side, side)}
    sound = {"input_values": torch.randn(SAMPLES, 4000)}

    def drawn(*shape: int, below: int = labels) -> dict[str, Tensor]:
        return {"labels": torch.randint(0, below, shape)}

    match task:
        case "CAUSAL_LM" | "MASKED_LM":
            return {**text, "labels": tokens.clone()}
        case "SEQ_TO_SEQ_CAUSAL_LM":
            return {**text, "labels": torch.randint(3, WORDS, (SAMPLES, 7))}
        case "TOKEN_CLASSIFICATION":
            return {**text, **drawn(SAMPLES, TOKENS)}
        case "QUESTION_ANSWERING":
            return {**text, **{f"{end}_positions": drawn(SAMPLES, below=TOKENS)["labels"] for end in ("start", "end")}}
        case "MULTIPLE_CHOICE":
            return {"input_ids": torch.randint(3, WORDS, (SAMPLES, 2, TOKENS)), **drawn(SAMPLES, below=2)}
        case "IMAGE_CLASSIFICATION":
            return {**picture, **drawn(SAMPLES)}
        case "SEMANTIC_SEGMENTATION":
            return {**picture, **drawn(SAMPLES, side, side)}
        case "AUDIO_CLASSIFICATION":
            return {**sound, **drawn(SAMPLES)}
        case "CTC":
            return {**sound, "labels": torch.randint(3, configuration.vocab_size - 1, (SAMPLES, 4))}
    return {**text, **drawn(SAMPLES)}


def small_model(name: str, task: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a class's small model, with weights by its own rules, and a batch for it."""
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    configuration = small_configuration(kind.config_class)
    return kind(configuration), batch_for(task, configuration)
