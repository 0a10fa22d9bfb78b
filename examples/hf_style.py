"""Train a transformers model with arguments by the names that users of its trainer know.

    python examples/hf_style.py

The model is a configuration (examples/llama-tiny), the data the text of README.md; with your own, give
`data="text:FOLDER"` and `tokenizer="tokenizer.json"` (docs/data.md). Without `cluster`, the processor of this machine
plays two devices; `cluster="laptop"` is an emulated network of three places.
"""

from pathlib import Path

from spantrain import Callback, Trainer, TrainerControl, TrainerState, TrainingArguments

HERE = Path(__file__).parent


class Best(Callback):
    """Keeps the least loss."""

    def __init__(self) -> None:
        self.loss = float("inf")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Look at a step's loss."""
        del args, control, kwargs
        assert state.last is not None
        self.loss = min(self.loss, state.last.loss)


def main() -> None:
    """Train for thirty steps, and say what came of it."""
    arguments = TrainingArguments(
        max_steps=30,
        train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_steps=10,
        eval_steps=15,
        save_total_limit=1,
        seed=0,
    )
    best = Best()
    trainer = Trainer(
        f"hf:{HERE / 'llama-tiny'}",
        data=f"text:{HERE.parent / 'README.md'}",
        sequence_length=32,
        args=arguments,
        callbacks=[best],
    )
    outcome = trainer.train()
    weights = trainer.state_dict()
    held_out = [entry.loss for entry in outcome.heldout_losses]
    print(f"losses {outcome.losses[0]:.3f} -> {outcome.losses[-1]:.3f} (best {best.loss:.3f})")
    print(f"held-out loss {held_out[0]:.3f} -> {held_out[-1]:.3f}")
    print(f"of all that is held out: {trainer.evaluate()['eval_loss']:.3f}")
    print(
        f"{sum(tensor.numel() for tensor in weights.values())} numbers in {len(weights)} tensors, {outcome.checkpoint}"
    )


if __name__ == "__main__":
    main()
