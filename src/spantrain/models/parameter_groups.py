"""Which parameters are updated with options of their own: by name and class of module, the same in every plan."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from spantrain.core.job import TrainJob
from spantrain.core.units import ModelSpec
from spantrain.core.update.optimizers import ParameterGroup
from spantrain.errors import ConfigError
from spantrain.models.build import unit_source

GroupRule = Callable[[str, nn.Parameter], Mapping[str, Any]]
"""Of a parameter's name and the parameter, which may have no numbers: options of the optimizer's that are its own."""

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""In names in small letters: of these and of `nn.LayerNorm`, the transformers library's trainer decays none."""


def with_groups(job: TrainJob, spec: ModelSpec, rule: GroupRule | None = None) -> TrainJob:
    """Return a job whose parameters are in groups by a rule; None: biases and normalizations do not decay.

    A parameter that has several names is in the group of its first.

    Raises:
        ConfigError: the rule returns something else than options of the optimizer's, or raises.
    """
    module = unit_source(spec).unsplit(seed=job.seed, weights=False)[0]
    given = _undecayed(module) if rule is None else rule
    options_of: dict[int, tuple[str, dict[str, Any]]] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in options_of:
            options = _checked(name, given, parameter)
            options_of[id(parameter)] = repr(sorted(options.items())), options
        key, options = options_of[id(parameter)]
        if options:
            names.setdefault(key, []).append(name)
    by_key = dict(options_of.values())
    groups = tuple(ParameterGroup(names=tuple(found), options=by_key[key]) for key, found in names.items())
    try:
        return replace(job, parameter_groups=groups)
    except ValueError as error:
        raise ConfigError(f"parameter groups: {error}") from None


def _checked(name: str, rule: GroupRule, parameter: nn.Parameter) -> dict[str, Any]:
    try:
        options: object = rule(name, parameter)
    except Exception as error:
        raise ConfigError(
            f"parameter groups: the function raises at {name}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ConfigError(
            f"parameter groups: of {name} the function returns {options!r}; wanted a dict of the optimizer's options, "
            "such as {'weight_decay': 0.0}, or {} for none of its own"
        )
    return dict(options)


def _undecayed(module: nn.Module) -> GroupRule:
    inside = {
        id(parameter)
        for name, child in module.named_modules()
        if name and isinstance(child, nn.LayerNorm)
        for parameter in child.parameters()
    }

    def rule(name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
        return {"weight_decay": 0.0} if id(parameter) in inside or _UNDECAYED.search(name.lower()) else {}

    return rule
