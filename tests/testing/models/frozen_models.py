"""Models of which a part is trained, as users write them: layers held fast, biases alone, adapters of `peft`."""

import torch
from torch import Tensor, nn

SAMPLES, TOKENS, WORDS = 6, 7, 40


def batch() -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (SAMPLES, TOKENS))
    return {"input_ids": words, "labels": words}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 5, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": WORDS}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_hidden_layers": 5, "vocab_size": WORDS, "max_position_embeddings": 16, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more))


def upper_blocks():
    """Embeddings, and the head that is one of them, and the lower blocks are held fast."""
    torch.manual_seed(1)
    model = gpt2()
    for fixed in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:3]):
        fixed.requires_grad_(False)
    return model, batch()


def last_block():
    """Nothing is trained in the first stages, and nothing in the head."""
    torch.manual_seed(1)
    model = llama().requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    return model, batch()


def biases():
    """Biases and norms alone, in all blocks; the embedding is trained and tied to the head."""
    torch.manual_seed(1)
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name or "ln_" in name or "wte" in name)
    return model, batch()


def adapters():
    """Low-rank adapters of two projections of each block, begun with numbers that are not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    wanted = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(), wanted), batch()


def adapters_on_bfloat16():
    """The base in 16 bits, adapters in 32."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    wanted = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama().to(torch.bfloat16), wanted), batch()


def adapters_and_head():
    """Adapters in the products of tokens and a head of its own that is saved with them."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    wanted = LoraConfig(
        r=2, lora_alpha=4, target_modules=["up_proj", "o_proj"], modules_to_save=["lm_head"], use_rslora=True
    )
    return get_peft_model(llama(), wanted), batch()


GOOD = (upper_blocks, last_block, biases, adapters, adapters_and_head)
