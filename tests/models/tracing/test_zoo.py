"""A part of the zoo, of each family some: what trains does so as plain PyTorch, the rest is refused with the reason.

Llama, T5, BART and Whisper do so in `test_brought_models` and `test_own_forward`, and all in benchmarks/model_zoo.py.
"""

import pytest

from testing.models.zoo.trial import EQUAL, names, tried

pytestmark = pytest.mark.models

TRAIN = (
    "convolutions.batch_norm_cnn", "convolutions.diffusion_unet", "convolutions.fourier_operator",
    "convolutions.timm_vit", "decoders.deepseek_v3", "decoders.gemma3", "decoders.llama_padded",
    "decoders.mamba2", "decoders.mixtral_balanced", "decoders.recurrent_gemma", "encoders.albert",
    "encoders.deberta_v2", "encoders.longformer", "encoders.squeezebert", "encoders.xlm",
    "pairs.wav2vec2_ctc", "pairs.wav2vec2_ctc_padded", "pictures.clip", "pictures.detr",
    "pictures.llava", "pictures.swin", "pictures.vilt", "plain.branches_on_a_batch", "plain.branches_on_data",
    "plain.contrastive", "plain.contrastive_by_kinds", "plain.gives_a_distribution", "plain.hands_a_module_on",
    "plain.layers_that_say_numbers", "plain.lstm_with_tokens_first", "plain.mixture", "plain.own_checkpointing",
    "plain.tied_autoencoder", "plain.torch_transformer", "plain.vae_that_draws_of_a_distribution",
)  # fmt: skip

REFUSED = {"plain.contrastive_with_numbers_of_rows": "numbers rows itself where it has to"}


def test_the_zoo_is_large():
    assert len(names()) >= 45
    assert {*TRAIN, *REFUSED} <= {*names()}


@pytest.mark.parametrize("name", TRAIN)
def test_it_trains_as_plain_pytorch_does(name):
    found = tried(name, devices=2 + len(name) % 3)
    assert (found.refused, found.crashed) == ("", "")
    assert found.stages > 1
    assert found.error <= EQUAL


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_reason(name):
    assert REFUSED[name] in tried(name, devices=2).refused
