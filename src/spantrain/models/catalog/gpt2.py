"""GPT-2 as units: embeddings; each block; final normalization, output layer (tied) and loss."""

import torch
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2PreTrainedModel

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import unit_names
from spantrain.models.units import ModuleUnit, UnitModule, sample_losses


def configuration(spec: ModelSpec) -> GPT2Config:
    """Return the transformers configuration: no dropout, scaled-dot-product attention."""
    # The attention kernel's causal mask is an argument, not a tensor: each block has its own, none is sent.
    return GPT2Config(
        **spec.config,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


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


class GPT2Head(UnitModule):
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

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over samples."""
        return sample_losses(self.logits(hidden), labels).sum()


def make_unit(spec: ModelSpec, index: int) -> UnitModule:
    """Build one unit; its weights are to be drawn by `initialize`."""
    names, config = unit_names(spec), configuration(spec)
    if index == 0:
        return GPT2Embedding(names[index], config)
    if index == len(names) - 1:
        return GPT2Head(names[index], config)
    return ModuleUnit(names[index], GPT2Block(config, layer_idx=index - 1))


def initialize(spec: ModelSpec, unit: UnitModule) -> None:
    """Draw the weights of a unit by the rules of the transformers library."""
    rules = GPT2PreTrainedModel(configuration(spec))
    unit.apply(rules._init_weights)
