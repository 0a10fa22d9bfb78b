"""Users' functions for model, data and loss: a program calls those that it was started with, whatever a plan names.

A plan, a checkpoint or an order was written by others, and what it names would be executed. So a function in it is only
taken as a question for one of this program's own: the same name in a file of the same name. Where the file lies may
differ between machines; what a model's and a loss's file holds is compared with the plan's, and what data is read with
the other machines' (their digests).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.data.choice import user_functions

_DIGITS = 64


def with_own_functions(spec: ModelSpec, own: Sequence[str]) -> ModelSpec:
    """Return the model with this program's functions in the place of those that it names.

    Raises:
        ConfigError: the program was not started with such a function; or the model says nothing of the file that its
            function, or its loss, was in.
    """
    loss, digest = spec.config.get("loss"), spec.config.get("loss_sha256")
    digests = ((spec.source, spec.source_sha256), *([(loss, digest)] if loss is not None else []))
    for what, sha256 in digests if spec.family == "factory" else ():
        if not isinstance(sha256, str) or len(sha256) != _DIGITS:
            raise ConfigError(f"model {spec.name}: the SHA-256 of {what}'s file is not known; profile and plan again")
    for named in user_functions(spec):
        found = next((function for function in own if _key(function) == _key(named)), None)
        if found is None:
            raise ConfigError(
                f"this run calls {named}, which this program was not started with; start it with --function "
                f"{_key(named)} if you trust that file"
            )
        if named == spec.source and spec.family == "factory":
            spec = replace(spec, source=found)
        elif named == spec.dataset:
            spec = replace(spec, dataset=found)
        else:
            spec = replace(spec, config={**spec.config, "loss": found})
    return spec


def _key(function: str) -> str:
    """Return what is compared: `FILE.py:FUNCTION` without the folder, or `package.module:function`.

    >>> _key("/home/one/data.py:samples")
    'data.py:samples'
    """
    file, _, name = function.rpartition(":")
    return f"{Path(file).name}:{name}"
