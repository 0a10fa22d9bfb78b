"""Small transformers configurations of the kinds of models that people bring."""

import json
from pathlib import Path

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import resolve_model

TEXT = {"vocab_size": 260}
DECODER = {
    **TEXT, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8,
}  # fmt: skip
PLAIN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
IMAGES = {"num_labels": 10, "image_size": 32}

CONFIGURATIONS = {
    "gpt2": {**TEXT, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0},
    "gpt_neo": {
        **TEXT, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "max_position_embeddings": 8, "window_size": 4,
        "attention_types": [[["global", "local"], 2]],
    },
    "opt": {
        **TEXT, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "max_position_embeddings": 8, "word_embed_proj_dim": 16,
    },
    "llama": DECODER,
    "qwen2": {**DECODER, "tie_word_embeddings": True},
    "qwen3": {**DECODER, "head_dim": 8},
    "bert": {**TEXT, **PLAIN, "max_position_embeddings": 8},
    "vit": {**IMAGES, **PLAIN, "patch_size": 8},
    "resnet": {"num_labels": 10, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]},
    "efficientnet": {
        **IMAGES, "width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320, "kernel_sizes": [3, 3, 5],
        "in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "strides": [1, 2, 2], "num_block_repeats": [1, 2, 2],
        "expand_ratios": [1, 6, 6], "depthwise_padding": [],
    },
    "t5": {
        **TEXT, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2,
        "relative_attention_num_buckets": 8, "n_positions": 8,
    },
}  # fmt: skip
"""By model type, as a config.json says them."""

UNITS = {
    "gpt2": ("transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.h.2", "lm_head"),
    "gpt_neo": ("transformer.wte", *(f"transformer.h.{layer}" for layer in range(4)), "lm_head"),
    "opt": ("model.decoder.embed_tokens", *(f"model.decoder.layers.{layer}" for layer in range(3)), "lm_head"),
    "llama": ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"),
    "qwen2": ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"),
    "qwen3": ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"),
    "bert": ("bert.embeddings", *(f"bert.encoder.layer.{layer}" for layer in range(3)), "cls"),
    "resnet": (
        "resnet.embedder", *(f"resnet.encoder.stages.{stage}.layers.{layer}" for stage in (0, 1) for layer in (0, 1)),
        "classifier",
    ),
    "efficientnet": (
        "efficientnet.embeddings", *(f"efficientnet.encoder.blocks.{block}" for block in range(5)), "classifier"
    ),
    "t5": (
        "encoder.embed_tokens", "encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1", "lm_head",
    ),
}  # fmt: skip
"""Units that must be found; ViT's blocks have other names in other versions of the library."""


def library_spec(kind: str, folder: Path) -> ModelSpec:
    """Write a configuration as people have it, and name it."""
    file = folder / kind / "config.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"model_type": kind, **CONFIGURATIONS[kind]}))
    return resolve_model(f"hf:{file.parent}")
