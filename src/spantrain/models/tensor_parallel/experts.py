"""Experts of a mixture whose weights lie in one tensor: every expert's inner width is divided, routing is not.

All members route alike and run all experts on their own inner columns, as transformers' plans have it for
`moe_tp_experts`. How a batch is cut does not change what an expert does to a token, so gradients stay exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from spantrain.core.span import Span
from spantrain.models.tensor_parallel.division import Change, Divider, ModuleRule, part_of
from spantrain.models.tensor_parallel.group import sum_parts

_FUSED, _DOWN = "gate_up_proj", "down_proj"
_LAYOUT = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_post_expert_norm": False}
"""How the library stores the experts that are known here."""


def expert_rule(unit: nn.Module, path: str, name: str, module: nn.Module) -> ModuleRule | None:  # noqa: ARG001
    """Return how the experts in a module are divided; None if it holds none, or holds them in another way."""
    fused, down = module._parameters.get(_FUSED), module._parameters.get(_DOWN)
    if fused is None or down is None or fused.dim() != 3 or down.dim() != 3 or len(module._parameters) != 2:
        return None
    if any(getattr(module, key, None) is not value for key, value in _LAYOUT.items()):
        return None
    width = down.shape[2]
    if fused.shape[1] != 2 * width or fused.shape[2] != down.shape[1]:
        return None

    def changes(by: Divider, columns: Sequence[Span]) -> tuple[Change, ...]:
        own = columns[by.group.rank]
        parts = {_FUSED: part_of(fused, 1, own, width, blocks=2), _DOWN: part_of(down, 2, own, width)}
        return (Change(path=path, module=module, parts=parts, build=lambda new: _divided(module, new, by)),)

    return ModuleRule(paths=(path,), pieces=width, changes=changes)


def _divided(module: nn.Module, parameters: Mapping[str, nn.Parameter], by: Divider) -> nn.Module:
    """Give the module its parts; its inputs and routing weights then are copies, its output a sum over the group."""
    for name, parameter in parameters.items():
        setattr(module, name, parameter)

    def copied(value: Any) -> Any:
        return by.copy(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(read, with_kwargs=True)
    module.register_forward_hook(lambda _module, _inputs, output: sum_parts(output, by.group))
    return module
