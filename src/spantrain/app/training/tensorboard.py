"""TensorBoard scalars, where they are wanted."""

from collections.abc import Mapping
from pathlib import Path

from spantrain.errors import ConfigError
from spantrain.runtime.coordinator.barrier import StepOutcome


class ScalarWriter:
    """Writes the tags that users of other trainers know; does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._writer = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--tensorboard needs TensorBoard; run: pip install 'spantrain[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder))

    def write(self, outcome: StepOutcome, global_batch: int, bytes_per_s: Mapping[str, float]) -> None:
        """Write one step's scalars; `bytes_per_s` of the links that follow a trace."""
        if self._writer is None:
            return
        if outcome.evaluation_loss is not None:
            self._writer.add_scalar("loss_metrics/heldout_loss", outcome.evaluation_loss, outcome.step)
        if outcome.loss is None:
            return
        self._writer.add_scalar("loss_metrics/global_avg_loss", outcome.loss, outcome.step)
        self._writer.add_scalar("grad_norm", outcome.grad_norm, outcome.step)
        self._writer.add_scalar("throughput(samples_per_s)", global_batch / outcome.duration_s, outcome.step)
        for link, rate in bytes_per_s.items():
            self._writer.add_scalar(f"link_rate(bytes_per_s)/{link}", rate, outcome.step)
        for name, busy_s in outcome.busy_s.items():
            self._writer.add_scalar(f"bubble_ratio/{name}", max(0.0, 1.0 - busy_s / outcome.duration_s), outcome.step)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
