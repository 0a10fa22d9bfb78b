"""Encoders with decoders of the transformers library, given labels alone, and models of sounds."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SAMPLES, TOKENS, WORDS = 6, 10, 48
SIZES = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


def _written() -> dict[str, Tensor]:
    """What is read, with its padding, and what is to be written."""
    tokens = torch.randint(3, WORDS, (SAMPLES, TOKENS))
    mask = torch.ones_like(tokens)
    tokens[2, 6:], mask[2, 6:] = 1, 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(3, WORDS, (SAMPLES, 8))}


def _pair(kind: str, name: str = "", **more: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    configuration = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    return getattr(transformers, name or f"{kind}ForConditionalGeneration")(configuration), _written()


def t5():
    """As many layers as the library gives where nobody says how many."""
    configuration = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_ff=48, d_kv=8, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(configuration), _written()


def mt5():
    configuration = transformers.MT5Config(
        vocab_size=WORDS, d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=4, decoder_start_token_id=0
    )
    return transformers.MT5ForConditionalGeneration(configuration), _written()


def bart():
    return _pair("Bart")


def mbart():
    return _pair("MBart")


def marian():
    return _pair("Marian", "MarianMTModel", decoder_vocab_size=WORDS)


def pegasus():
    return _pair("Pegasus")


def _sounds() -> dict[str, Tensor]:
    return {"input_features": torch.randn(SAMPLES, 8, 32), "labels": torch.randint(3, WORDS, (SAMPLES, 8))}


def whisper():
    sizes = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "suppress_tokens": None}
    sizes["begin_suppress_tokens"] = None
    configuration = transformers.WhisperConfig(**SIZES, **sizes)
    return transformers.WhisperForConditionalGeneration(configuration), _sounds()


WAVES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_labels": 3, "classifier_proj_size": 16,
    "mask_time_prob": 0.0, "layerdrop": 0.0, "vocab_size": 12,
}  # fmt: skip


def wav2vec2():
    batch = {"input_values": torch.randn(SAMPLES, 400), "labels": torch.arange(SAMPLES) % 3}
    return transformers.Wav2Vec2ForSequenceClassification(transformers.Wav2Vec2Config(**WAVES)), batch


def wav2vec2_ctc():
    batch = {"input_values": torch.randn(SAMPLES, 400), "labels": torch.randint(1, 12, (SAMPLES, 4))}
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**WAVES)), batch


def wav2vec2_ctc_padded():
    """The mean over sentences of unlike lengths."""
    model, batch = wav2vec2_ctc()
    model.config.ctc_loss_reduction = "mean"
    batch["labels"][1, 3:] = -100
    batch["labels"][4, 2:] = -100
    return model, batch


def hubert():
    batch = {"input_values": torch.randn(SAMPLES, 400), "labels": torch.arange(SAMPLES) % 3}
    return transformers.HubertForSequenceClassification(transformers.HubertConfig(**WAVES)), batch
