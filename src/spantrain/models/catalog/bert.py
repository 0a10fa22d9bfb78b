"""BERT for masked bytes as units: embeddings; each layer; transform, output layer (tied) and loss."""

from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertLayer,
    BertOnlyMLMHead,
    BertPreTrainedModel,
)

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import unit_names
from spantrain.models.units import ModuleUnit, UnitModule, sample_losses

_GROUP = "word_embeddings"


def configuration(spec: ModelSpec) -> BertConfig:
    """Return the transformers configuration: no dropout, scaled-dot-product attention, no padding byte."""
    return BertConfig(
        **spec.config,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,
        attn_implementation="sdpa",
    )


class BertEmbedding(ModuleUnit):
    """Bytes to vectors: token, position and type embeddings, normalized."""

    def __init__(self, name: str, config: BertConfig) -> None:
        super().__init__(name, BertEmbeddings(config))
        self.shared = {_GROUP: "body.word_embeddings.weight"}


class BertHead(UnitModule):
    """Transform, output layer tied to the token embedding, loss on the masked bytes."""

    def __init__(self, name: str, config: BertConfig) -> None:
        super().__init__(name, prefixes={"cls": "cls"}, shared={_GROUP: "cls.predictions.decoder.weight"})
        self.cls: nn.Module = BertOnlyMLMHead(config)
        predictions = self.cls.get_submodule("predictions")
        predictions.bias = self.cls.get_parameter("predictions.decoder.bias")  # one parameter, two names, as unsplit
        self.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `(samples, tokens, vocabulary)`."""
        logits: Tensor = self.cls(hidden)
        return logits

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over samples."""
        return sample_losses(self.logits(hidden), labels).sum()


def make_unit(spec: ModelSpec, index: int) -> UnitModule:
    """Build one unit; its weights are to be drawn by `initialize`."""
    names, config = unit_names(spec), configuration(spec)
    if index == 0:
        return BertEmbedding(names[index], config)
    if index == len(names) - 1:
        return BertHead(names[index], config)
    return ModuleUnit(names[index], BertLayer(config, layer_idx=index - 1))


def initialize(spec: ModelSpec, unit: UnitModule) -> None:
    """Draw the weights of a unit by the rules of the transformers library."""
    rules = BertPreTrainedModel(configuration(spec))
    unit.apply(rules._init_weights)
