"""The outer optimizer for the Trainer of transformers: a callback, and nothing else in the user's script changes."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from spantrain.outer.client.metrics import OuterMetrics
from spantrain.outer.client.optimizer import OuterOptimizer

__all__ = ["OuterTrainerCallback"]

Join = Callable[[Iterable[tuple[str, Tensor]]], OuterOptimizer]


class OuterTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Takes part in the training of several clusters while a Trainer trains in this one.

        Trainer(..., callbacks=[OuterTrainerCallback()])                    # under `spantrain outer run`
        join = functools.partial(OuterOptimizer, master=..., token=..., cluster="a")
        Trainer(..., callbacks=[OuterTrainerCallback(join)])

    Parameters that are trained are shared, frozen ones are not. A push weighs what its tokens do, where the Trainer
    counts them (`include_num_input_tokens_seen`), else what its samples do: do the same in all clusters.
    """

    def __init__(self, join: Join = OuterOptimizer.from_environment, *, finish_s: float = 60.0) -> None:
        """Join when training begins; wait for the last version, when it ends, for so long."""
        self._join = join
        self._finish_s = finish_s
        self._outer: OuterOptimizer | None = None
        self._tokens_seen = 0  # over all processes; 0 where the Trainer does not count them
        self.metrics = OuterMetrics()
        """What the outer optimizer did, as of the last step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_more: Any) -> None:  # noqa: ARG002
        """Join."""
        self.close()
        self._tokens_seen = int(state.num_input_tokens_seen)
        self._outer = self._join((name, one) for name, one in model.named_parameters() if one.requires_grad)

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:  # noqa: ARG002
        """Count a step, and take a version if one has come."""
        if self._outer is None:
            return
        before, self._tokens_seen = self._tokens_seen, int(state.num_input_tokens_seen)
        tokens = (self._tokens_seen - before) // max(1, args.world_size)
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._outer.step(tokens=tokens or samples)
        self.metrics = self._outer.metrics

    def on_train_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:  # noqa: ARG002
        """Push what is left, take the last version, leave."""
        if self._outer is not None:
            self._outer.finish(self._finish_s)
            self.metrics = self._outer.metrics
        self.close()

    def close(self) -> None:
        """Leave; the Trainer calls `on_train_end` only where nothing has failed."""
        if self._outer is not None:
            self._outer.close()
            self._outer = None
