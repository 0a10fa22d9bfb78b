"""Fine-tune adapters over two emulated places, beside transformers' own trainer with peft on one device.

    pip install 'spantrain[peft]'
    python examples/finetune_lora.py

The pretrained folder is made here, with random weights, so that nothing is downloaded; put yours in the place of
`BASE`. The model, its adapters, the data, their order, the optimizer and its schedule are the same on both sides; so is
each step's loss, to 1e-4. With a folder alone, `spantrain train --model hf:FOLDER --lora ...` needs no code
(docs/fine-tuning.md). Devices are emulated; computation, gradients and messages are real.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from spantrain import Trainer, TrainingArguments
from spantrain.core.span import Span
from spantrain.models.sampler import Sampler

BASE = Path(tempfile.gettempdir()) / "spantrain-example-base"
SAMPLES, TOKENS, WORDS, BATCH, RATE, DECAY, SEED = 48, 32, 96, 8, 2e-2, 0.01, 7
CLUSTER = """\
name: two-places
emulated_speed: 0.004
sites:
  - name: lab
    network: {bandwidth: 1 Gbit/s, latency: 0.2 ms}
    hosts: [{name: lab, backend: emulated, devices: {xavier-nx: 1}}]
  - name: home
    network: {bandwidth: 1 Gbit/s, latency: 0.2 ms}
    hosts: [{name: home, backend: emulated, devices: {xavier-nx: 1}}]
links:
  - {between: all, bandwidth: 100 Mbit/s, latency: 5 ms}
"""


def make_base() -> None:
    """Write a small decoder with random weights, as `save_pretrained` does."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=TOKENS,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(BASE)


def build() -> tuple[PeftModel, dict[str, torch.Tensor]]:
    """Return the pretrained model with adapters, and an example batch: what workers call, and the comparison."""
    model = transformers.LlamaForCausalLM.from_pretrained(BASE)
    torch.manual_seed(SEED)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, adapters), {name: torch.stack([one[name] for one in data()[:2]]) for name in data()[0]}


def data() -> list[dict[str, torch.Tensor]]:
    """Return samples that have something to learn: numbers that rise by steps of their own."""
    rows = [torch.arange(TOKENS) * (1 + number % 5) + number for number in range(SAMPLES)]
    return [{"input_ids": row % WORDS, "labels": row % WORDS} for row in rows]


class OneDevice(transformers.Trainer):
    """transformers' trainer, which takes samples in the order of the list and notes its losses."""

    losses: list[float]

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *given: object, **named: object) -> torch.Tensor:
        """Do as ever."""
        loss = super().training_step(*given, **named)
        self.losses.append(float(loss))
        return loss


def on_one_device(steps: int, out: Path) -> list[float]:
    """Return the losses of transformers' trainer, on the samples that spantrain's sampler deals."""
    sampler, whole = Sampler(dataset_size=SAMPLES, global_batch=BATCH, seed=SEED), Span(0, BATCH)
    dealt = [data()[index] for step in range(steps) for index in sampler.indices(step, whole)]
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE,
        weight_decay=DECAY, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, seed=SEED,
    )  # fmt: skip
    trainer = OneDevice(build()[0], arguments, train_dataset=dealt)
    trainer.losses = []
    trainer.train()
    return trainer.losses


def over_two_places(steps: int, out: Path) -> tuple[list[float], tuple[str, ...]]:
    """Return the losses of the same over two places, and the devices that took part."""
    (out / "two-places.yaml").write_text(CLUSTER)
    arguments = TrainingArguments(
        output_dir=out / "run", max_steps=steps, train_batch_size=BATCH, learning_rate=RATE, weight_decay=DECAY,
        logging_steps=0, seed=SEED,
    )  # fmt: skip
    cluster = out / "two-places.yaml"
    trainer = Trainer(build, data=data(), args=arguments, cluster=cluster, measure=False)
    outcome = trainer.fit()
    return list(outcome.losses), tuple(outcome.devices)


def main(steps: int = 12) -> float:
    """Train both ways; show the losses side by side, and return how far apart they are at most."""
    make_base()
    try:
        with tempfile.TemporaryDirectory() as folder:
            losses, devices = over_two_places(steps, Path(folder))
            plain = on_one_device(steps, Path(folder) / "plain")
    finally:
        shutil.rmtree(BASE)
    print(f"on {', '.join(devices)}, beside transformers.Trainer with peft on one device")
    print("step   two places   one device   difference")
    for step, (own, other) in enumerate(zip(losses, plain, strict=True), 1):
        print(f"{step:4}   {own:10.6f}   {other:10.6f}   {own - other:10.1e}")
    return max(abs(own - other) for own, other in zip(losses, plain, strict=True))


if __name__ == "__main__":
    sys.exit(main() > 1e-4)
