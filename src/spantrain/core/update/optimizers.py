"""The optimizers that train: torch's, what each takes, and how much state it keeps.

An update is exact in every plan, since a device has all of a parameter, or the update of a part needs that part alone;
those for which that does not hold need whole parameters (`Optimizer.needs_whole`).
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any

from spantrain.core.names import unknown_name
from spantrain.core.records import Record


class OptimizerKind(Record):
    """One of torch's optimizers."""

    torch_class: str
    """In `torch.optim`."""
    copies: float
    """Float32 copies of a parameter that its state is at most."""
    uses_adam_options: bool = False
    """Whether it takes the job's `adam_beta1`, `adam_beta2` and `adam_epsilon`."""
    options: Mapping[str, float | bool] = field(default_factory=dict)
    """What it takes besides, with torch's defaults."""
    more_state: tuple[str, ...] = ()
    """Options that cost another copy each."""
    fuses: bool = False
    """Whether accelerators have one kernel for it."""
    needs_whole: bool = False
    """Whether an update of a part of a parameter needs the rest of it, so that no tensors can be divided."""


class ParameterGroup(Record):
    """Parameters that are updated with options of their own."""

    names: tuple[str, ...]
    """In the unsplit model; every name of those that have several."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """As torch's constructor takes them: `lr` (the full rate), `weight_decay`, `betas`, ..."""


_DECOUPLED: Mapping[str, float | bool] = {"decoupled_weight_decay": False}
_BOUNDS = MappingProxyType({"rho": (0, 1), "alpha": (0, 1), "beta2_decay": (-math.inf, 0), "d": (1, math.inf)})
"""The least and the most of options that are no numbers from 0 up."""
OPTIMIZERS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        "adamw": OptimizerKind(
            torch_class="AdamW",
            fuses=True,
            copies=2.0,
            uses_adam_options=True,
            options={"amsgrad": False},
            more_state=("amsgrad",),
        ),
        "adam": OptimizerKind(
            torch_class="Adam",
            fuses=True,
            copies=2.0,
            uses_adam_options=True,
            options={"amsgrad": False, **_DECOUPLED},
            more_state=("amsgrad",),
        ),
        "sgd": OptimizerKind(torch_class="SGD", fuses=True, copies=0.0, options={"dampening": 0.0, "nesterov": False}),
        "adafactor": OptimizerKind(
            torch_class="Adafactor",
            # Sums of rows and of columns: of a matrix with one column, two copies; of most matrices next to nothing.
            copies=2.0,
            options={"beta2_decay": -0.8, "d": 1.0},
            needs_whole=True,
        ),
        "adagrad": OptimizerKind(
            torch_class="Adagrad", copies=1.0, options={"lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
        ),
        "rmsprop": OptimizerKind(
            torch_class="RMSprop",
            copies=1.0,
            options={"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False},
            more_state=("momentum", "centered"),
        ),
        "nadam": OptimizerKind(
            torch_class="NAdam", copies=2.0, uses_adam_options=True, options={"momentum_decay": 4e-3, **_DECOUPLED}
        ),
        "radam": OptimizerKind(torch_class="RAdam", copies=2.0, uses_adam_options=True, options=_DECOUPLED),
        "adamax": OptimizerKind(torch_class="Adamax", copies=2.0, uses_adam_options=True),
        "adadelta": OptimizerKind(torch_class="Adadelta", copies=2.0, options={"rho": 0.9, "eps": 1e-6}),
    }
)

_OTHER_PACKAGE = "is another package's, and devices make torch's own, whose state moves and resumes under any plan"
REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "rprop": "steps by the sign of a gradient, which the order of a sum can turn, so that plans would differ, and "
        "ignores learning rates behind the first",
        "asgd": "leaves its result, the averaged parameters, in its own state, where nobody would read it",
        "lbfgs": "runs the model again within an update",
        "sparseadam": "takes sparse gradients, which are not summed here",
        "muon": "takes matrices alone, and needs another optimizer for all other parameters",
        **dict.fromkeys(("lion", "lion_32bit", "ademamix", "stable_adamw"), "is not in torch"),
        **dict.fromkeys(("lomo", "adalomo", "grokadamw", "adamw_anyprecision", "adamw_torch_4bit"), _OTHER_PACKAGE),
    }
)
_OTHERS = ("galore_", "apollo_", "schedule_free_", "paged_", "rmsprop_bnb")
_FIELDS: Mapping[str, str] = MappingProxyType({"lr": "learning_rate", "weight_decay": "weight_decay"})
_ADAM_FIELDS: Mapping[str, str] = MappingProxyType(
    {"eps": "adam_epsilon", **{name: name for name in ("adam_beta1", "adam_beta2", "adam_epsilon")}}
)


def optimizer_refusal(name: str) -> str | None:
    """Say why an optimizer that others have is none here; None of those that are, and of names that nobody has."""
    reason = REFUSED_OPTIMIZERS.get(name)
    if reason is None and (name.startswith(_OTHERS) or name.endswith(("_8bit", "_bnb_8bit"))):
        reason = _OTHER_PACKAGE
    return None if reason is None else f"optimizer {name} {reason}. Known: {', '.join(OPTIMIZERS)}"


def optimizer_problems(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Say what is wrong with an optimizer's name or options."""
    if name not in OPTIMIZERS:
        yield optimizer_refusal(name) or unknown_name("optimizer", name, tuple(OPTIMIZERS))
        return
    known = OPTIMIZERS[name].options
    for key, value in options.items():
        low, high = _BOUNDS.get(key, (0, math.inf))
        if key not in known:
            none = f"optimizer {name} takes no option {key!r}"
            yield unknown_name(f"option of optimizer {name}", key, tuple(known)) if known else none
        elif isinstance(known[key], bool):
            if not isinstance(value, bool):
                yield f"option {key} of optimizer {name} must be true or false, got {value!r}"
        elif type(value) not in (int, float) or not (math.isfinite(value) and low <= value <= high):
            yield f"option {key} of optimizer {name} must be a finite number from {low} to {high}, got {value!r}"


def optimizer_fields(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job for an optimizer and what its constructor, or a user, gives it.

    >>> optimizer_fields("adamw", {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True})["optimizer_options"]
    {'amsgrad': True}
    """
    fields: dict[str, Any] = {"optimizer": name}
    is_adam = name in OPTIMIZERS and OPTIMIZERS[name].uses_adam_options
    known = {**_FIELDS, **(_ADAM_FIELDS if is_adam else {}), **({"momentum": "momentum"} if name == "sgd" else {})}
    options: dict[str, Any] = {}
    for key, value in given.items():
        if is_adam and key == "betas":
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise ValueError(f"betas must be two numbers, got {value!r}")
            fields["adam_beta1"], fields["adam_beta2"] = value
        elif key in known:
            fields[known[key]] = value
        else:
            options[key] = value
    return fields | ({"optimizer_options": options} if options else {})


def division_refusal(name: str) -> str:
    """Say why no tensors can be divided under an optimizer; empty where they can, or there is no such optimizer."""
    if name not in OPTIMIZERS or not OPTIMIZERS[name].needs_whole:
        return ""
    return f"optimizer {name} needs whole parameters, so no tensors can be divided among devices (tensor parallelism)"


def optimizer_state(name: str, momentum: float, options: Mapping[str, Any]) -> str:
    """Return an optimizer by the state that it keeps, a name of `STATE_COPIES`.

    >>> optimizer_state("sgd", 0.9, {}), optimizer_state("adamw", 0.0, {"amsgrad": True})
    ('momentum', 'adamw+amsgrad')
    """
    if name == "sgd":
        return "momentum" if momentum else "sgd"
    return "+".join((name, *(key for key in OPTIMIZERS[name].more_state if options.get(key))))


def _state_copies() -> Iterator[tuple[str, float]]:
    yield "momentum", 1.0
    for name, kind in OPTIMIZERS.items():
        for count in range(len(kind.more_state) + 1):
            for more in itertools.combinations(kind.more_state, count):
                yield "+".join((name, *more)), kind.copies + count


STATE_COPIES: Mapping[str, float] = MappingProxyType(dict(_state_copies()))
"""Bytes of optimizer state for one byte of float32 parameters, at most; `momentum` is SGD with it."""


def named_values(what: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE pairs, with numbers, true, false and null as such.

    Raises:
        ValueError: one is none, or a name stands twice.

    >>> named_values("options", ["amsgrad=true", "alpha=0.9"])
    {'amsgrad': True, 'alpha': 0.9}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not (name and sign) or name in found:
            raise ValueError(f"{what} {text}: give NAME=VALUE, each name once")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
