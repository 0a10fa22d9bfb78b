"""Models that `gpu.py` trains, and the operations of their steps."""

from dataclasses import dataclass, replace
from typing import Any

from spantrain.config.kinds import load_kinds


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, and how it is trained."""

    name: str
    config: dict[str, Any]
    """Of transformers."""
    sequence: int
    global_batch: int
    micro_batches: tuple[int, ...]
    dropout: float = 0.0

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.sequence


def gpt2(name: str, **changes: Any) -> Case:
    """GPT-2 small, or smaller."""
    size = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024} | changes
    drops = size.pop("dropout", 0.0)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **size}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), drops)
    return Case(
        name=name, config=config, sequence=size["n_positions"], global_batch=64, micro_batches=(8, 16, 32),
        dropout=drops,
    )  # fmt: skip


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
CASES = {
    case.name: case
    for case in (
        gpt2("gpt2"),
        gpt2("gpt2-dropout", dropout=0.1),
        replace(gpt2("gpt2-small-batch"), global_batch=8, micro_batches=(2, 4)),
        Case(
            name="llama-1b",
            config={
                **LLAMA, "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
                "num_key_value_heads": 8, "intermediate_size": 5632, "vocab_size": 32000,
                "max_position_embeddings": 2048,
            },
            sequence=1024,
            global_batch=32,
            micro_batches=(4, 8),
        ),
        # For a look at the script on a processor.
        replace(
            gpt2("tiny", n_layer=4, n_embd=64, n_head=4, vocab_size=300, n_positions=64),
            global_batch=16, micro_batches=(4, 8),
        ),
    )
}  # fmt: skip


def peak_flop_per_s(kind: str) -> float:
    """Return the kind's 16-bit rate."""
    return load_kinds()[kind].peak_fp16_flop_per_s


def flop_per_token(case: Case) -> float:
    """Return the operations of a training step for one token, as MFU counts them."""
    c = case.config
    width = c.get("n_embd") or c["hidden_size"]
    layers = c.get("n_layer") or c["num_hidden_layers"]
    if c["model_type"] == "gpt2":
        block = 12 * width * width
    else:
        heads, keys = c["num_attention_heads"], c["num_key_value_heads"]
        block = width * width * (2 + 2 * keys / heads) + 3 * width * c["intermediate_size"]
    head = width * c["vocab_size"]
    return 6.0 * (layers * block + head) + 12.0 * layers * width * case.sequence
