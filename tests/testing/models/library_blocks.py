"""Single blocks of the transformers library as units, for rules that no model of the catalogue needs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    ViTConfig,
)
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoBlock
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

from spantrain.models.units import UnitModule

WIDTH, HEADS, TOKENS = 48, 6, 5
_ALIKE = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 40, "attn_implementation": "sdpa"}
_GROUPED = {**_ALIKE, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 16}


class BlockUnit(UnitModule):
    """A block, its positions turned where it wants them."""

    def __init__(self, block: nn.Module, rotary: nn.Module | None = None, *, prefix: str = "model.layers.0") -> None:
        super().__init__(prefix, prefixes={"block": prefix, "rotary": "rotary"})
        self.block, self.rotary = block, rotary
        self.eval()

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        words: dict[str, Any] = {}
        if self.rotary is not None:
            words["position_embeddings"] = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
        found = self.block(hidden, **words)
        return (found[0] if isinstance(found, tuple) else found,)


def _rotated(config: LlamaConfig, block: Callable[..., nn.Module]) -> BlockUnit:
    return BlockUnit(block(config, layer_idx=0), LlamaRotaryEmbedding(config))


def _gpt_neox() -> BlockUnit:
    config = GPTNeoXConfig(**_ALIKE, use_parallel_residual=True)
    return BlockUnit(GPTNeoXLayer(config, layer_idx=0), GPTNeoXRotaryEmbedding(config), prefix="gpt_neox.layers.0")


def _gpt_neo() -> BlockUnit:
    config = GPTNeoConfig(
        hidden_size=WIDTH,
        num_heads=HEADS,
        num_layers=1,
        attention_types=[[["local"], 1]],
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    return BlockUnit(GPTNeoBlock(config, layer_id=0), prefix="transformer.h.0")


class _Decoder(nn.Module):
    """torch's decoder layer, with cross attention over what it reads itself, and a causal mask."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 40, dropout=0.0, batch_first=batch_first, norm_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        if self.layer.self_attn.batch_first:
            return self.layer(hidden, 2 * hidden, tgt_mask=mask, tgt_is_causal=True)
        turned = hidden.transpose(0, 1)
        return self.layer(turned, 2 * turned, tgt_mask=mask).transpose(0, 1)


class _Weighted(nn.Module):
    """torch's attention, its weights used too, some tokens hidden."""

    def __init__(self, *, average: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.average = average

    def forward(self, hidden: Tensor) -> Tensor:
        hide = (torch.arange(hidden.shape[1]) == 2).expand(hidden.shape[0], -1)
        mixed, weights = self.attention(
            hidden, hidden, hidden, key_padding_mask=hide, average_attn_weights=self.average
        )
        return mixed * (1 + weights.flatten(1).square().sum(dim=1)[:, None, None])


class _Positioned(nn.Module):
    """Two blocks of T5: the first one makes the bias of positions, both use it; a decoder's read what enters too."""

    def __init__(self, *, is_decoder: bool) -> None:
        super().__init__()
        config = T5Config(d_model=WIDTH, d_kv=8, num_heads=HEADS, d_ff=40, is_decoder=is_decoder, use_cache=False)
        config._attn_implementation = "sdpa"
        self.first = T5Block(config, has_relative_attention_bias=True, layer_idx=0)
        self.second = T5Block(config, layer_idx=1)
        self.is_decoder = is_decoder

    def forward(self, hidden: Tensor) -> Tensor:
        read = {"encoder_hidden_states": 2 * hidden} if self.is_decoder else {}
        middle, bias, cross = self.first(hidden, **read)
        found, _, _ = self.second(middle, position_bias=bias, encoder_decoder_position_bias=cross, **read)
        return found + bias.mean()


class _Convolutions(nn.Module):
    """Four convolutions of a user's network, in two pairs, on tokens as rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(6, 9, 3, padding=1), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 6, 1), nn.MaxPool2d(1),
            nn.Conv2d(6, 8, 3, padding="same", bias=False), nn.SiLU(), nn.Conv2d(8, 6, 3, padding=1),
        )  # fmt: skip

    def forward(self, hidden: Tensor) -> Tensor:
        image = hidden.unflatten(2, (6, -1)).transpose(1, 2)
        return hidden + self.layers(image).transpose(1, 2).flatten(2)


class _Gate(nn.Module):
    """A user's own attention, of which the program knows what its plan says."""

    _tp_plan: ClassVar = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query, key, value = (layer(hidden).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return hidden + self.out(mixed.flatten(2))


BLOCKS: Mapping[str, Callable[[], BlockUnit]] = MappingProxyType(
    {
        "gpt-neo": _gpt_neo,
        "gpt-neox": _gpt_neox,
        "llama": lambda: _rotated(LlamaConfig(**_GROUPED), LlamaDecoderLayer),
        "opt": lambda: BlockUnit(
            OPTDecoderLayer(
                OPTConfig(hidden_size=WIDTH, num_attention_heads=HEADS, ffn_dim=40, attn_implementation="sdpa"),
                layer_idx=0,
            )
        ),
        "phi3": lambda: _rotated(Phi3Config(**_ALIKE, pad_token_id=0), Phi3DecoderLayer),
        "qwen2": lambda: _rotated(Qwen2Config(**_GROUPED), Qwen2DecoderLayer),
        "qwen3": lambda: _rotated(Qwen3Config(**_GROUPED), Qwen3DecoderLayer),
        "mixtral": lambda: _rotated(MixtralConfig(**_GROUPED, num_local_experts=4), MixtralDecoderLayer),
        "sequential": lambda: BlockUnit(
            nn.Sequential(nn.Linear(WIDTH, 30), nn.GELU(), nn.Dropout(0.1), nn.Linear(30, WIDTH), nn.LayerNorm(WIDTH))
        ),
        "torch attention": lambda: BlockUnit(_Weighted(average=True)),
        "torch attention of each head": lambda: BlockUnit(_Weighted(average=False)),
        "torch decoder": lambda: BlockUnit(_Decoder(batch_first=True)),
        "torch decoder, samples second": lambda: BlockUnit(_Decoder(batch_first=False)),
        "torch encoder": lambda: BlockUnit(nn.TransformerEncoderLayer(WIDTH, HEADS, 40, batch_first=True)),
        "convolutions": lambda: BlockUnit(_Convolutions()),
        "t5": lambda: BlockUnit(_Positioned(is_decoder=False)),
        "t5 decoder": lambda: BlockUnit(_Positioned(is_decoder=True)),
        "user's plan": lambda: BlockUnit(_Gate()),
        "vit": lambda: BlockUnit(ViTLayer(ViTConfig(**_ALIKE)), prefix="vit.layers.0"),
    }
)


def make_block(name: str, seed: int = 0) -> BlockUnit:
    """A block with the same weights whenever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unit = BLOCKS[name]()
        for parameter in unit.parameters():
            nn.init.normal_(parameter, std=0.2)
    return unit
