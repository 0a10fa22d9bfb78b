"""Models as people bring them: classes of the transformers library as they are, and modules of plain torch."""

import functools
import tempfile

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from testing.models.recurrent_models import ReadsPacked, Recurrent

SAMPLES, TOKENS, WORDS, WIDTH, CLASSES = 6, 8, 40, 8, 3
TEXT = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
DECODER = {**TEXT, "num_hidden_layers": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
BERT = {**TEXT, "num_hidden_layers": 3, "max_position_embeddings": 16, "num_labels": CLASSES}
PAIR = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def words() -> Tensor:
    return torch.randint(3, WORDS, (SAMPLES, TOKENS))


def padding() -> Tensor:
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.int64)
    mask[1, 5:] = 0
    mask[3, 6:] = 0
    return mask


def causal(**more) -> dict[str, Tensor]:
    tokens = words()
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def kinds() -> Tensor:
    return torch.arange(SAMPLES) % CLASSES


# --- language models with the cache that they have by default, with masks, with their own labels


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)), causal(attention_mask=padding())


def llama_of_a_folder():
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)).save_pretrained(folder)
        return transformers.LlamaForCausalLM.from_pretrained(folder), causal()


def llama_compiled():
    model, batch = llama()
    return torch.compile(model), batch


def llama_with_checkpointing():
    model, batch = llama()
    model.gradient_checkpointing_enable()
    return model, batch


def llama_with_its_head_alone():
    model, batch = llama()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model, batch


def gpt2():
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), causal(
        attention_mask=torch.ones(SAMPLES, TOKENS, dtype=torch.int64)
    )


def gemma2():
    config = transformers.Gemma2Config(**DECODER, head_dim=8, sliding_window=4)
    return transformers.Gemma2ForCausalLM(config), causal()


def opt():
    sizes = {"ffn_dim": 32, "num_hidden_layers": 2, "word_embed_proj_dim": 16, "max_position_embeddings": 16}
    config = transformers.OPTConfig(vocab_size=WORDS, hidden_size=16, num_attention_heads=2, **sizes)
    return transformers.OPTForCausalLM(config), causal(attention_mask=padding())


def mixtral():
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config), causal()


# --- encoders, and encoders with decoders


def bert_classifier():
    batch = {"input_ids": words(), "attention_mask": padding(), "labels": kinds()}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)), batch


def bert_of_words():
    batch = {"input_ids": words(), "labels": torch.randint(0, CLASSES, (SAMPLES, TOKENS))}
    return transformers.BertForTokenClassification(transformers.BertConfig(**BERT)), batch


def distilbert():
    sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16}
    config = transformers.DistilBertConfig(vocab_size=WORDS, **sizes, num_labels=CLASSES)
    batch = {"input_ids": words(), "attention_mask": padding(), "labels": kinds()}
    return transformers.DistilBertForSequenceClassification(config), batch


def t5():
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 3, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=WORDS, **sizes, relative_attention_num_buckets=8, decoder_start_token_id=0
    )
    batch = {"input_ids": words(), "decoder_input_ids": words(), "labels": words()}
    return transformers.T5ForConditionalGeneration(config), batch


def t5_with_labels_alone():
    model, batch = t5()
    del batch["decoder_input_ids"]
    return model, batch


def bart_that_drops_layers():
    config = transformers.BartConfig(**PAIR, max_position_embeddings=16, dropout=0.0, encoder_layerdrop=0.5)
    batch = {"input_ids": words(), "decoder_input_ids": words(), "labels": words()}
    return transformers.BartForConditionalGeneration(config), batch


def whisper():
    sizes = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**PAIR, **sizes))
    return model, {"input_features": torch.randn(SAMPLES, 8, 16), "decoder_input_ids": words(), "labels": words()}


# --- plain torch


class Block(nn.Module):
    def __init__(self, *, chance: float = 0.0, always: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(chance)
        self.always = always

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.dropout(torch.tanh(self.linear(hidden)))
        return hidden + (functional.dropout(made, 0.5) if self.always else made)


def classified(*layers: nn.Module):
    batch = torch.randn(SAMPLES, WIDTH), kinds()
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), batch, functional.cross_entropy


def dropout():
    return classified(Block(chance=0.3), Block(chance=0.3))


def dropout_in_evaluation_mode():
    model, batch, loss = dropout()
    return model.eval(), batch, loss


def compiled():
    return classified(torch.compile(Block()), torch.compile(Block()))


@functools.cache
def compiled_class():
    """Made when it is wanted: `torch.compile` loads its compiler, which takes seconds."""

    @torch.compile
    def doubled(hidden: Tensor) -> Tensor:
        return 2 * torch.tanh(hidden)

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        @torch.compile
        def forward(self, hidden: Tensor) -> Tensor:
            return self.second(doubled(self.first(hidden)))

    return Compiled


def compiled_functions():
    return compiled_class()(), *classified()[1:]


def normalized():
    return classified(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


def normalized_and_frozen():
    model, batch, loss = normalized()
    model[1].eval()
    return model, batch, loss


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.first(hidden).unsqueeze(1).chunk(3, -1)
        chance = 0.2 if self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=chance)
        return self.second(torch.dropout(found[:, 0], 0.4, self.training))


def functional_dropout():
    return Functional(), *classified()[1:]


def recurrent():
    return Recurrent(WIDTH, CLASSES), (torch.randn(SAMPLES, 5, WIDTH), kinds()), functional.cross_entropy


class Depth(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return hidden
        return super().forward(hidden)


def stochastic_depth():
    return classified(Depth(), Depth())


def spectral_norm():
    return classified(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.ReLU())


class CountsByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.second(self.first(hidden)))
        losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return losses.sum() / (labels != -100).sum()


def counts_by_hand():
    return CountsByHand(), {"hidden": torch.randn(SAMPLES, TOKENS, WIDTH), "labels": torch.ones(SAMPLES, TOKENS).long()}


# --- what is refused


def dropout_always():
    return classified(Block(always=True), Block())


def statistics_of_the_batch():
    return classified(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=False))


class Again(Block):
    reentrant = False

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=self.reentrant)


def dropout_run_again():
    return classified(Again(chance=0.3))


class AgainInside(Again):
    reentrant = True


def dropout_run_again_by_a_backward_pass_inside():
    return classified(nn.Linear(WIDTH, WIDTH), AgainInside(chance=0.3))


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            self.scratch.add_(1)
        return super().forward(hidden)


def counts_what_it_saw():
    return classified(Counting(), Counting())


def hooked():
    model, batch, loss = classified(Block())
    model[0].register_forward_hook(lambda _module, _inputs, output: 2 * output)
    return model, batch, loss


def packed():
    words, lengths = torch.randint(0, WORDS, (SAMPLES, TOKENS)), torch.tensor([8, 3, 5, 1, 8, 2])
    return (
        ReadsPacked(WORDS, WIDTH, CLASSES),
        (words, lengths, torch.arange(SAMPLES) % CLASSES),
        functional.cross_entropy,
    )


def gradient_hooked():
    model, batch, loss = classified(nn.Linear(WIDTH, WIDTH))
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    return model, batch, loss


def gradient_hooked_behind():
    model, batch, loss = classified(nn.Linear(WIDTH, WIDTH))
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.clamp_(-1, 1))
    return model, batch, loss


def traced():
    model, batch, loss = classified(Block())
    return torch.jit.trace(model, batch[0]), batch, loss


def old_weight_norm():
    return classified(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))


def data_parallel():
    model, batch, loss = classified(Block())
    return nn.DataParallel(model), batch, loss


def lazy():
    return classified(nn.LazyLinear(WIDTH))


def on_meta():
    with torch.device("meta"):
        model, _, loss = classified(Block())
    return model, (torch.randn(SAMPLES, WIDTH), kinds()), loss


class Record:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Packs(Block):
    def forward(self, hidden: Tensor) -> Record:
        return Record(super().forward(hidden))


class Unpacks(Block):
    def forward(self, record: Record) -> Tensor:
        return super().forward(record.hidden)


def an_object_is_passed_on():
    return classified(Packs(), Unpacks())


class Attends(nn.Module):
    """Whose blocks are closed, since a look at the numbers of its mask decides."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.block(hidden)) * (2.0 if bool((hidden > 9).all()) else 1.0)


def looks_at_numbers():
    return Attends(), *classified()[1:]
