"""Models of pictures, and of pictures with texts, of the transformers library."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SAMPLES, EDGE, KINDS = 6, 32, 3
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": EDGE,
    "patch_size": 8, "num_labels": KINDS,
}  # fmt: skip
TEXT = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def _images(edge: int = EDGE) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(SAMPLES, 3, edge, edge), "labels": torch.arange(SAMPLES) % KINDS}


def _classifier(kind: str, **sizes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    configuration = getattr(transformers, f"{kind}Config")(num_labels=KINDS, **sizes)
    return getattr(transformers, f"{kind}ForImageClassification")(configuration), _images()


def _plain(kind: str, **more: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    return _classifier(kind, **{key: value for key, value in SIZES.items() if key != "num_labels"}, **more)


def vit():
    return _plain("ViT")


def deit():
    return _plain("DeiT")


def beit():
    return _plain("Beit", use_relative_position_bias=True)


def dinov2():
    return _plain("Dinov2")


def swin():
    return _classifier(
        "Swin", image_size=EDGE, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )


def convnext():
    return _classifier("ConvNext", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 3, 1])


def convnext_v2():
    return _classifier("ConvNextV2", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 3, 1])


def resnet():
    return _classifier("ResNet", embedding_size=8, hidden_sizes=[16, 24, 32, 40], depths=[1, 2, 2, 1])


def mobilenet_v2():
    return _classifier("MobileNetV2", depth_multiplier=0.25, image_size=EDGE, initializer_range=0.3)


def efficientnet():
    sizes = {"kernel_sizes": [3, 3, 5], "in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "strides": [1, 2, 2]}
    more = {"num_block_repeats": [1, 2, 2], "expand_ratios": [1, 6, 6], "depthwise_padding": [], "hidden_dim": 320}
    return _classifier("EfficientNet", image_size=EDGE, width_coefficient=0.25, depth_coefficient=1.0, **sizes, **more)


def segformer():
    configuration = transformers.SegformerConfig(
        num_labels=KINDS, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16, sr_ratios=[2, 2, 1, 1],
    )  # fmt: skip
    batch = {**_images(64), "labels": torch.randint(0, KINDS, (SAMPLES, 64, 64))}
    return transformers.SegformerForSemanticSegmentation(configuration), batch


class ReturnsItsLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Tensor) -> Tensor:
        return self.model(**given, return_loss=True).loss


def clip():
    """Each text and picture beside all the others of the batch."""
    configuration = transformers.CLIPConfig(text_config=TEXT, vision_config=SIZES, projection_dim=16)
    words = torch.randint(3, 48, (SAMPLES, 8))
    words[:, -1] = 1
    made = {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": _images()["pixel_values"]}
    return ReturnsItsLoss(transformers.CLIPModel(configuration)), made


def llava():
    """Sixteen words of each text stand for the picture."""
    configuration = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
        vision_config=transformers.CLIPVisionConfig(**SIZES),
        image_token_id=3,
        vision_feature_layer=-2,
    )
    words = torch.randint(4, 48, (SAMPLES, 24))
    words[:, 2:18] = 3
    made = {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": _images()["pixel_values"]}
    return transformers.LlavaForConditionalGeneration(configuration), {**made, "labels": words.clone()}


def vilt():
    configuration = transformers.ViltConfig(
        **SIZES, vocab_size=48, max_position_embeddings=16, modality_type_vocab_size=2
    )
    words = torch.randint(3, 48, (SAMPLES, 8))
    made = {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": _images()["pixel_values"]}
    return transformers.ViltForQuestionAnswering(configuration), {**made, "labels": torch.rand(SAMPLES, KINDS)}


def blip():
    configuration = transformers.BlipConfig(text_config=TEXT, vision_config=SIZES, projection_dim=16)
    words = torch.randint(3, 48, (SAMPLES, 8))
    made = {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": _images()["pixel_values"]}
    return transformers.BlipForConditionalGeneration(configuration), {**made, "labels": words.clone()}


def detr():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    configuration = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, use_pretrained_backbone=False, d_model=32,
        encoder_layers=4, decoder_layers=4, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_queries=5, num_labels=KINDS,
    )  # fmt: skip

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels)

    made = {"pixel_values": torch.randn(SAMPLES, 3, 64, 64), "labels": torch.randint(0, KINDS + 1, (SAMPLES, 5))}
    return transformers.DetrForObjectDetection(configuration), made, loss
