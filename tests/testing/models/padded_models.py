"""Factories of transformers' models on a padded batch whose samples count unlike numbers of labels."""

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

SAMPLES, LENGTH, VOCABULARY = 6, 12, 64
_FILLED = (12, 3, 7, 2, 10, 5)


def _batch() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=chance)
    mask = torch.arange(LENGTH) < torch.tensor(_FILLED)[:, None]
    tokens = torch.where(mask, tokens, 0)
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": torch.where(mask, tokens, -100)}


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ), _batch()


def gpt2():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_head=2, n_layer=5, n_positions=32))
    return model.eval(), _batch()


def bert():
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=2
        )
    )
    return model.eval(), _batch()


def t5():
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=4, num_heads=2, decoder_start_token_id=0
        )
    )
    return model.eval(), _batch()
