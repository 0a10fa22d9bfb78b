"""Two clusters train one language model together, each with the Trainer of transformers and one callback.

    pip install accelerate        # which that Trainer needs
    python examples/outer_hf_trainer.py

The model is a small GPT-2 on bytes, the text is Python's own source. On real machines each cluster runs this file under
`spantrain outer run CONFIG --cluster NAME -- python examples/outer_hf_trainer.py`.
"""

import importlib.util
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

STEPS, INNER_STEPS, BATCH, LENGTH = 64, 16, 16, 64
SOURCES = ("argparse.py", "ast.py", "doctest.py", "pickle.py", "typing.py")


def text() -> torch.Tensor:
    """Return some of Python's standard library, as bytes."""
    folder = Path(os.__file__).parent
    return torch.frombuffer(bytearray(b"".join((folder / name).read_bytes() for name in SOURCES)), dtype=torch.uint8)


class Pieces(torch.utils.data.Dataset[dict[str, Any]]):
    """Pieces of text; the clusters read different ones."""

    def __init__(self, cluster: str) -> None:
        whole = text()
        count = len(whole) // LENGTH
        self._pieces = whole[: count * LENGTH].view(count, LENGTH).long()[ord(cluster[0]) % 2 :: 2]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def train(cluster: str) -> None:
    """Train as one cluster: the callback joins when training begins, and leaves when it ends."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from spantrain import OuterTrainerCallback

    torch.set_num_threads(1)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    callback = OuterTrainerCallback()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3,
            lr_scheduler_type="constant", logging_steps=16, report_to=[], save_strategy="no", disable_tqdm=True,
            use_cpu=True, seed=ord(cluster[0]),
        )  # fmt: skip
        trainer = Trainer(
            model=GPT2LMHeadModel(config), args=arguments, train_dataset=Pieces(cluster), callbacks=[callback]
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told = callback.metrics
    print(
        f"cluster {cluster}  losses {', '.join(f'{float(loss):.3f}' for loss in losses)}  version {told.version}, "
        f"{told.outer_rounds} rounds",
        flush=True,
    )


def one_cluster(cluster: str, variables: dict[str, str]) -> None:
    """Train as `spantrain outer run` would have it."""
    os.environ.update(variables)
    train(cluster)


def main() -> None:
    """Start a server and two clusters."""
    from spantrain import LocalParameterServer

    started = multiprocessing.get_context("spawn")
    with LocalParameterServer() as server:
        joining = {
            "SPANTRAIN_OUTER_MASTER": server.address, "SPANTRAIN_OUTER_TOKEN": server.token,
            "SPANTRAIN_OUTER_INNER_STEPS": str(INNER_STEPS),
        }  # fmt: skip
        clusters = [
            started.Process(target=one_cluster, args=(name, {**joining, "SPANTRAIN_OUTER_CLUSTER": name}))
            for name in ("a", "b")
        ]
        for process in clusters:
            process.start()
        for process in clusters:
            process.join()
        print(f"the master made {server.status().version} versions")


if __name__ == "__main__":
    if importlib.util.find_spec("accelerate") is None:
        sys.exit("the Trainer of transformers needs accelerate: pip install accelerate")
    if "SPANTRAIN_OUTER_CLUSTER" in os.environ:
        train(os.environ["SPANTRAIN_OUTER_CLUSTER"])
    else:
        main()
