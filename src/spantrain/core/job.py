"""How to train: steps, optimizer, learning rate, clipping; the same for every plan."""

from dataclasses import dataclass

from spantrain.core.plan import WireFormat

__all__ = ["ADAPTERS", "LR_SCHEDULES", "MOST_TRACE_STEPS", "OPTIMIZERS", "TrainJob"]

ADAPTERS = ("auto", "paper", "off")
OPTIMIZERS = ("adamw", "sgd")
LR_SCHEDULES = ("constant", "cosine", "linear")
MOST_TRACE_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What every worker needs to know besides the plan."""

    steps: int
    seed: int = 0
    optimizer: str = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    momentum: float = 0.9
    """Of SGD."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    warmup_steps: int = 10
    lr_schedule: str = "constant"
    """After the warm-up: `constant`, or down to zero at `decay_steps`: `cosine`, or `linear`, in a straight line."""
    decay_steps: int = 1000
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None leaves them."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end and when interrupted."""
    evaluate_every: int = 0
    """Steps between evaluations on held-out data, the start and the end included; 0: never."""
    trace_steps: int = 3
    """The last so many steps go into the trace; at most 50."""
    loss_scale: float = 65536.0
    """Under float16: what the loss is multiplied by at first (`policy.loss_scale`)."""
    adapter: str = "auto"
    """What follows the network while it trains (`docs/adapter.md`)."""
    allow_wire: tuple[WireFormat, ...] = ()
    """What `auto` may send over slow cuts, besides what the plan says."""
    staleness: int = 0
    """How many steps old the weights are that a step works on: 1 lets steps overlap (`policy.two_steps`)."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.adapter not in ADAPTERS:
            raise ValueError(f"adapter must be one of {', '.join(ADAPTERS)}, got {self.adapter!r}")
        if self.staleness not in (0, 1):
            raise ValueError(f"staleness must be 0 (exact) or 1, got {self.staleness}")
        if self.staleness and self.adapter != "off":
            raise ValueError(f"staleness 1 goes with adapter off, got {self.adapter}: plans change between steps only")
        if self.lr_schedule not in LR_SCHEDULES:
            raise ValueError(f"lr_schedule must be one of {', '.join(LR_SCHEDULES)}, got {self.lr_schedule!r}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.lr_schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps ({self.decay_steps}) must exceed warmup_steps ({self.warmup_steps})")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive, got {self.max_grad_norm}")
        if self.trace_steps > MOST_TRACE_STEPS:
            raise ValueError(f"trace_steps must be at most {MOST_TRACE_STEPS}, got {self.trace_steps}")
        if not (0 <= self.adam_beta1 < 1 and 0 <= self.adam_beta2 < 1):
            raise ValueError(f"adam_beta1 and adam_beta2 must lie in 0 to 1, got {self.adam_beta1}, {self.adam_beta2}")
        for name in ("adam_epsilon", "loss_scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup_steps", "checkpoint_every", "evaluate_every", "trace_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
