"""BERT for masked bytes as units: embeddings; each layer; transform, output layer (tied) and loss."""

from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer, BertOnlyMLMHead, BertPreTrainedModel

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.family import CatalogFamily
from spantrain.models.units import HeadUnit, ModuleUnit, UnitModule

_GROUP = "word_embeddings"


class BertEmbedding(ModuleUnit):
    """Bytes to vectors: token, position and type embeddings, normalized."""

    def __init__(self, name: str, config: BertConfig) -> None:
        super().__init__(name, BertEmbeddings(config))
        self.shared = {_GROUP: "body.word_embeddings.weight"}


class BertHead(HeadUnit):
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


class BertFamily(CatalogFamily):
    """Weights are drawn by the rules of the transformers library."""

    whole = "BertForMaskedLM"

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

    def last(self, name: str) -> UnitModule:
        """Build the output layer."""
        return BertHead(name, self.config)

    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
        unit.apply(BertPreTrainedModel(self.config)._init_weights)
