"""GPT-2, and BERT for masked bytes, as units: embeddings; each block; output layer (tied) and loss.

Weights are drawn by the rules of the transformers library.
"""

import torch
from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer, BertOnlyMLMHead, BertPreTrainedModel
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2PreTrainedModel

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import CatalogFamily
from spantrain.models.units import HeadUnit, ModuleUnit, UnitModule

_WORDS = "word_embeddings"


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
    """Embeddings, blocks, output layer."""

    whole = "GPT2LMHeadModel"
    head = GPT2Head

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

    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
        unit.apply(GPT2PreTrainedModel(self.config)._init_weights)


class BertEmbedding(ModuleUnit):
    """Bytes to vectors: token, position and type embeddings, normalized."""

    def __init__(self, name: str, config: BertConfig) -> None:
        super().__init__(name, BertEmbeddings(config))
        self.shared = {_WORDS: "body.word_embeddings.weight"}


class BertHead(HeadUnit):
    """Transform, output layer tied to the token embedding, loss on the masked bytes."""

    def __init__(self, name: str, config: BertConfig) -> None:
        super().__init__(name, prefixes={"cls": "cls"}, shared={_WORDS: "cls.predictions.decoder.weight"})
        self.cls: nn.Module = BertOnlyMLMHead(config)
        predictions = self.cls.get_submodule("predictions")
        predictions.bias = self.cls.get_parameter("predictions.decoder.bias")  # one parameter, two names, as unsplit
        self.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `(samples, tokens, vocabulary)`."""
        logits: Tensor = self.cls(hidden)
        return logits


class BertFamily(CatalogFamily):
    """Embeddings, blocks, output layer."""

    whole = "BertForMaskedLM"
    head = BertHead

    @staticmethod
    def configuration(spec: ModelSpec) -> BertConfig:
        """Return it with scaled-dot-product attention and no padding byte."""
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertConfig(**spec.config, **drops, pad_token_id=None, attn_implementation="sdpa")

    def first(self, name: str) -> UnitModule:
        """Build the embeddings."""
        return BertEmbedding(name, self.config)

    def block(self, index: int) -> nn.Module:
        """Build a layer."""
        made: nn.Module = BertLayer(self.config, layer_idx=index)
        return made

    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
        unit.apply(BertPreTrainedModel(self.config)._init_weights)
