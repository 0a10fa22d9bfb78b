"""Encoders of the transformers library: classifiers of texts and words, and masked words."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SAMPLES, TOKENS, WORDS, KINDS = 6, 12, 48, 3
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 32, "num_labels": KINDS, "pad_token_id": 2,
}  # fmt: skip


def _texts() -> dict[str, Tensor]:
    """Texts of unlike lengths."""
    tokens = torch.randint(3, WORDS, (SAMPLES, TOKENS))
    mask = torch.ones_like(tokens)
    for sample, length in ((1, 7), (4, 9)):
        tokens[sample, length:] = 2
        mask[sample, length:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def _classified() -> dict[str, Tensor]:
    return {**_texts(), "labels": torch.arange(SAMPLES) % KINDS}


def _masked() -> dict[str, Tensor]:
    """Every fourth word is to be found."""
    made = _texts()
    labels = torch.full_like(made["input_ids"], -100)
    labels[:, ::4] = torch.randint(3, WORDS, (SAMPLES, TOKENS // 4))
    return {**made, "labels": labels}


def _library(
    name: str, configuration: str, made: dict[str, Tensor], **sizes: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    return getattr(transformers, name)(getattr(transformers, f"{configuration}Config")(**sizes)), made


def bert_masked():
    return _library("BertForMaskedLM", "Bert", _masked(), **SIZES)


def bert_classifier():
    return _library("BertForSequenceClassification", "Bert", _classified(), **SIZES)


def bert_of_words():
    batch = {**_texts(), "labels": torch.randint(0, KINDS, (SAMPLES, TOKENS))}
    return _library("BertForTokenClassification", "Bert", batch, **SIZES)


def bert_answers():
    """Two kinds of labels, neither of them called so."""
    batch = {**_texts(), "start_positions": torch.arange(SAMPLES) % 5, "end_positions": 6 + torch.arange(SAMPLES) % 5}
    return _library("BertForQuestionAnswering", "Bert", batch, **{**SIZES, "num_labels": 2})


def roberta():
    return _library("RobertaForSequenceClassification", "Roberta", _classified(), **{**SIZES, "pad_token_id": 1})


def xlm_roberta():
    return _library("XLMRobertaForMaskedLM", "XLMRoberta", _masked(), **{**SIZES, "pad_token_id": 1})


def xlm():
    """Writes into what dropout returns, which is what came in where nothing drops."""
    sizes = {"emb_dim": 32, "n_layers": 4, "n_heads": 4, "n_words": WORDS, "max_position_embeddings": 32}
    return _library("XLMForSequenceClassification", "XLM", _classified(), num_labels=KINDS, **sizes)


def squeezebert():
    """Calls the forward of its layers, and not the layers."""
    return _library("SqueezeBertForSequenceClassification", "SqueezeBert", _classified(), **SIZES, embedding_size=32)


def distilbert():
    sizes = {"dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4, "max_position_embeddings": 32}
    return _library(
        "DistilBertForSequenceClassification", "DistilBert", _classified(), vocab_size=WORDS, num_labels=KINDS, **sizes
    )


def deberta_v2():
    more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}
    return _library(
        "DebertaV2ForSequenceClassification", "DebertaV2", _classified(), **SIZES, **more, norm_rel_ebd="layer_norm"
    )


def electra():
    return _library("ElectraForSequenceClassification", "Electra", _classified(), **SIZES, embedding_size=16)


def electra_that_tells_made_words():
    batch = {**_texts(), "labels": torch.randint(0, 2, (SAMPLES, TOKENS))}
    del batch["attention_mask"]
    return _library("ElectraForPreTraining", "Electra", batch, **SIZES, embedding_size=16)


def albert():
    """One layer's weights in all four."""
    return _library("AlbertForSequenceClassification", "Albert", _classified(), **SIZES, embedding_size=16)


def modernbert():
    sizes = {**SIZES, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 1}
    return _library("ModernBertForMaskedLM", "ModernBert", _masked(), **sizes, bos_token_id=0, eos_token_id=1)


def mpnet():
    return _library("MPNetForSequenceClassification", "MPNet", _classified(), **{**SIZES, "pad_token_id": 1})


def xlnet():
    sizes = {"vocab_size": WORDS, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48, "num_labels": KINDS}
    return _library("XLNetForSequenceClassification", "XLNet", _classified(), **sizes)


def longformer():
    sizes = {**SIZES, "max_position_embeddings": 64, "attention_window": 4, "pad_token_id": 1}
    return _library("LongformerForSequenceClassification", "Longformer", _classified(), **sizes)
