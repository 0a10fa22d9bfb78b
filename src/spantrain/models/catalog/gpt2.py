"""GPT-2 as units: embeddings; each block; final normalization, output layer (tied) and loss."""

import torch
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2PreTrainedModel

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.family import CatalogFamily
from spantrain.models.units import HeadUnit, UnitModule


class GPT2Embedding(UnitModule):
    """Bytes to vectors: token and position embeddings. `(samples, tokens)` to `(samples, tokens, hidden)`."""

    def __init__(self, name: str, config: GPT2Config) -> None:
        prefixes = {"wte": "transformer.wte", "wpe": "transformer.wpe"}
        super().__init__(name, prefixes=prefixes, shared={"wte": "wte.weight"})
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.eval()

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Add the two embeddings."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return (self.wte(tokens) + self.wpe(positions),)


class GPT2Head(HeadUnit):
    """Final normalization, output layer tied to the token embedding, loss."""

    def __init__(self, name: str, config: GPT2Config) -> None:
        prefixes = {"ln_f": "transformer.ln_f", "lm_head": "lm_head"}
        super().__init__(name, prefixes=prefixes, shared={"wte": "lm_head.weight"})
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `(samples, tokens, vocabulary)`."""
        logits: Tensor = self.lm_head(self.ln_f(hidden))
        return logits


class Gpt2Family(CatalogFamily):
    """Weights are drawn by the rules of the transformers library."""

    whole = "GPT2LMHeadModel"

    @staticmethod
    def configuration(spec: ModelSpec) -> GPT2Config:
        """Return it with scaled-dot-product attention, whose causal mask is an argument: none is sent."""
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        tokens = {"bos_token_id": None, "eos_token_id": None}
        return GPT2Config(**spec.config, **drops, **tokens, use_cache=False, attn_implementation="sdpa")

    def first(self, name: str) -> UnitModule:
        """Build the embeddings."""
        return GPT2Embedding(name, self.config)

    def block(self, index: int) -> nn.Module:
        """Build a block."""
        made: nn.Module = GPT2Block(self.config, layer_idx=index)
        return made

    def last(self, name: str) -> UnitModule:
        """Build the output layer."""
        return GPT2Head(name, self.config)

    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
        unit.apply(GPT2PreTrainedModel(self.config)._init_weights)
