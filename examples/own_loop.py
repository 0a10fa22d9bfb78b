"""A training loop of one's own: batches are made here, devices train on them, and the weights come back.

    python examples/own_loop.py

The model is an ordinary module in this file; nothing in it knows of SpanTrain. Each device imports this file and builds
its part, so `build` is at the top level, and what must run once only stands under `if __name__ == "__main__"`.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import spantrain

CLASSES = 10
PIXELS = 64
WIDTH = 64


class Residual(nn.Module):
    """Two layers and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Add to what came."""
        return hidden + self.layers(self.norm(hidden))


class Reader(nn.Module):
    """Tells handwritten digits apart."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(PIXELS, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return a score for each class."""
        hidden = self.into(pixels)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's loss."""
    return functional.cross_entropy(scores, labels, reduction="none")


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model and an example batch: what `spantrain` needs to know."""
    return Reader(), (torch.zeros(2, PIXELS), torch.zeros(2, dtype=torch.int64))


def main() -> None:
    """Train for two hundred steps, then look at the result with plain torch."""
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images, labels = images.float() / 16.0, labels.long()
    held_out = torch.arange(len(labels)) % 5 == 0
    arguments = spantrain.TrainingArguments(
        train_batch_size=64, learning_rate=3e-3, lr_scheduler_type="constant", logging_steps=50
    )
    shuffle = torch.Generator().manual_seed(0)
    training = torch.nonzero(~held_out).flatten()
    # Two processors of one machine need no measuring to be planned for; a cluster of unlike devices does.
    with spantrain.session(build, loss, "adamw", args=arguments, measure=False) as session:
        for step in range(200):
            chosen = training[torch.randint(len(training), (session.global_batch,), generator=shuffle)]
            last = session.step((images[chosen], labels[chosen]))
            if step == 0:
                first = last
        weights = session.state_dict()
    model = Reader()
    model.load_state_dict(weights)
    with torch.no_grad():
        right = (model(images[held_out]).argmax(dim=1) == labels[held_out]).float().mean()
    print(f"loss {first:.3f} -> {last:.3f}; {right:.1%} of the held-out digits are read rightly")


if __name__ == "__main__":
    main()
