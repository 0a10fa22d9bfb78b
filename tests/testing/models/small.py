"""Models of each family that run in milliseconds."""

from dataclasses import replace
from pathlib import Path

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import resolve_model

TEXT = Path(__file__).parents[3] / "LICENSE"
"""All data there is: every process of a run reads and shuffles it, which takes a tenth of a second for a library's."""


def small_spec(family: str, *, layers: int) -> ModelSpec:
    """`layers`: of GPT-2; the others have two of what they are made of. EfficientNet is cut to its first two groups."""
    match family:
        case "gpt2":
            spec = replace(resolve_model("gpt2-tiny", sequence_length=8), dataset=f"text:{TEXT}")
            sizes: dict[str, object] = {"n_layer": layers, "n_embd": 16, "n_head": 2}
        case "bert":
            spec = replace(resolve_model("bert-small-tiny", sequence_length=8), dataset=f"text:{TEXT}")
            sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        case "resnet":
            spec = resolve_model("resnet-tiny")
            sizes = {"depths": (1, 2), "hidden_sizes": (16, 32)}
        case _:
            spec = resolve_model("efficientnet-tiny")
            groups = ("kernel_sizes", "in_channels", "out_channels", "strides", "expand_ratios")
            sizes = {field: spec.config[field][:2] for field in groups}  # type: ignore[index]
            sizes["num_block_repeats"] = (1, 2)
    return replace(spec, config={**spec.config, **sizes})
