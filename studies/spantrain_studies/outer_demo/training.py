"""How a cluster of the demonstration trains: a plain loop on an emulated device, with `OuterOptimizer`."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from spantrain.devices.emulated import EmulatedDevice
from spantrain.models.data.text import read_windows
from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions
from spantrain_studies.outer_demo.orders import DATA, LENGTH

_VOCABULARY = 256
_HEAD = 32


class SmallGPT(nn.Module):
    """A GPT over bytes; `(samples, length)` to `(samples, length, 256)`. By default 0.44 million parameters."""

    def __init__(self, *, length: int = LENGTH, width: int = 128, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(_VOCABULARY, width)
            self.positions = nn.Embedding(length, width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width, width // _HEAD, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
            self.norm = nn.LayerNorm(width)
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what each place says of the byte after it."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return functional.linear(self.norm(hidden), self.tokens.weight)


def byte_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss over windows of `length + 1` bytes."""
    said = model(windows[:, :-1])
    return functional.cross_entropy(said.reshape(-1, _VOCABULARY), windows[:, 1:].reshape(-1))


_WARM_UP_STEPS = 8
_HELD_OUT_WINDOWS = 32
_SAY_EVERY_S = 0.5
_FIGURES = ("inner_steps", "tokens", "outer_rounds", "mean_staleness", "comm_s", "train_s",
            "uncounted_samples")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClusterOrder:
    """What a cluster is told."""

    name: str
    master: str
    token: str
    encrypted: bool
    step_s: float
    """Seconds of an inner step on its emulated device."""
    inner_steps: int
    batch: int
    """Windows of an inner step."""
    learning_rate: float
    finish_s: float
    """How long it may take to bring in what it has at the end."""


def train_cluster(order: ClusterOrder, stop: threading.Event, say: Callable[..., None]) -> None:
    """Train until told to stop; say every half second how far it is, and at the end what came of it."""
    torch.set_num_threads(1)
    with _DemoTraining(order, say) as cluster:
        cluster.train(stop)


class _DemoTraining:
    """The loop of one cluster, and what it says."""

    def __init__(self, order: ClusterOrder, say: Callable[..., None]) -> None:
        self._order, self._say = order, say
        self._model = SmallGPT(length=LENGTH)
        self._held_out = _windows(held_out=True)[:_HELD_OUT_WINDOWS]
        self._device = EmulatedDevice()
        self._loss: float | None = None
        self._version = 0
        self._said_s = float("-inf")
        self._longest_step_s = 0.0
        self._inner = torch.optim.AdamW(self._model.parameters(), lr=order.learning_rate)
        say(heldout_loss=self._evaluate())
        self._outer = OuterOptimizer(
            dict(self._model.named_parameters()),
            inner_steps=order.inner_steps,
            master=order.master,
            token=order.token,
            cluster=order.name,
            options=OuterOptions(encrypted=order.encrypted),
        )
        self._began_s = self._now_s = time.monotonic()
        self._blocked_before_s = self._outer.metrics.blocked_s

    def __enter__(self) -> "_DemoTraining":
        return self

    def __exit__(self, *_: object) -> None:
        self._outer.close()

    def train(self, stop: threading.Event) -> None:
        """Do inner steps until told to stop, then bring in what is left and say what came of it."""
        windows = _windows(held_out=False)
        leased = self._outer.data(len(windows), batch_samples=self._order.batch)
        for number, indices in enumerate(leased, start=1):
            if stop.is_set():
                break
            batch = windows[indices]
            for group in self._inner.param_groups:
                group["lr"] = self._order.learning_rate * min(1.0, number / _WARM_UP_STEPS)
            heldout_loss = self._device.run(partial(self._step, batch), self._order.step_s)
            self._outer.step(tokens=batch[:, 1:].numel())
            now_s = time.monotonic()
            self._longest_step_s = max(self._longest_step_s, now_s - self._now_s)
            self._now_s = now_s
            self._tell(heldout_loss)
        blocked_s = self._blocked_s
        self._outer.finish(timeout_s=self._order.finish_s)
        self._version = self._outer.metrics.version
        self._tell(self._evaluate(), blocked_s=blocked_s, real_compute_ratio=self._device.real_compute_ratio)

    def _step(self, batch: Tensor) -> float | None:
        """Do one inner step; after a new version also find the held-out loss, in time that the device has left."""
        version = self._outer.metrics.version
        heldout_loss = self._evaluate() if version != self._version else None
        self._version = version
        loss = byte_losses(self._model, batch)
        self._inner.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._inner.step()
        self._loss = float(loss.detach())
        return heldout_loss

    @torch.no_grad()
    def _evaluate(self) -> float:
        return float(byte_losses(self._model, self._held_out))

    @property
    def _blocked_s(self) -> float:
        """Seconds of the loop in which training waited for the outer optimizer; waiting for a start does not count."""
        return self._outer.metrics.blocked_s - self._blocked_before_s

    def _tell(self, heldout_loss: float | None, **more: float) -> None:
        """Say how far it is: at once what was evaluated, else every half second."""
        if heldout_loss is None and self._now_s < self._said_s + _SAY_EVERY_S:
            return
        self._said_s = self._now_s
        metrics = self._outer.metrics
        figures = {name: getattr(metrics, name) for name in _FIGURES}
        figures["longest_step_s"], self._longest_step_s = self._longest_step_s, 0.0
        if heldout_loss is not None:
            more["heldout_loss"] = heldout_loss
        more.setdefault("blocked_s", self._blocked_s)
        self._say(**figures, loop_s=self._now_s - self._began_s, version=self._version, loss=self._loss, **more)


def _windows(*, held_out: bool) -> Tensor:
    rows = read_windows(DATA, LENGTH, held_out=held_out).rows
    return torch.from_numpy(np.array(rows, dtype=np.int64))
