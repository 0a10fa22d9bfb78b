"""The units of the catalog's models: made, seeded, emptied and compared with the whole, alike for every family.

They are written by hand, not followed as those of other models are (`models.tracing`): profiles, checkpoints and
figures know their names, first weights and cuts, and what members of a group divide of the image models.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import IMAGE_CHANNELS, IMAGE_SIDE, CatalogFamily, is_text, unit_names
from spantrain.models.randomness.draws import global_seed
from spantrain.models.sampler import derive_seed
from spantrain.models.tracing.batch import ModelBatch
from spantrain.models.units import COUNTED, LABELS, CheckedUnits, ModuleUnit, UnitModule, tie_parameters

_SHARED_STD = 0.02
"""Standard deviation of tied embeddings: the transformers library's for GPT-2 and BERT."""
_EXAMPLES = 2
_DRAWS = ("bernoulli_", "normal_", "uniform_")
"""Operations that fill a tensor at random, in place."""


class CatalogUnits:
    """Those of one model; every unit, and every group of shared parameters, has a seed of its own."""

    draws = False
    """Whether anything in them draws at random while it trains."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.names = unit_names(spec)

    @cached_property
    def _family(self) -> CatalogFamily:
        # Imported here: transformers takes seconds to import, and names need none of it.
        families: Mapping[str, type[CatalogFamily]]
        if self._spec.family in ("bert", "gpt2"):
            from spantrain.models.catalog.text import BertFamily, Gpt2Family

            families = {"bert": BertFamily, "gpt2": Gpt2Family}
        else:
            from spantrain.models.catalog.images import EfficientNetFamily, ResNetFamily

            families = {"efficientnet": EfficientNetFamily, "resnet": ResNetFamily}
        return families[self._spec.family](self._spec)

    def build(self, indices: Iterable[int], *, seed: int) -> list[UnitModule]:
        """Build units; members of a group of shared parameters are one object."""
        units = [self._seeded(index, seed) for index in indices]
        tie_parameters(units)
        return units

    def blank(self, indices: Iterable[int], *, seed: int) -> list[UnitModule]:
        """Build units for which nothing is drawn."""
        with _WithoutDraws():  # type: ignore[no-untyped-call]
            return self.build(indices, seed=seed)

    def empty(self, index: int) -> UnitModule:
        """Build a unit on the meta device."""
        with torch.device("meta"):
            return self._unit(index)

    def to_measure(self) -> CheckedUnits:
        """Return what builds a unit, each when it is asked for; nothing of the model is left out."""
        return CheckedUnits(at=lambda index: self._seeded(index, 0))

    def batch(self) -> ModelBatch:
        """Return zeros of the right shapes."""
        spec = self._spec
        if is_text(spec):
            assert spec.sequence_length is not None
            tokens = torch.zeros(_EXAMPLES, spec.sequence_length, dtype=torch.int64)
            return ModelBatch(inputs=(tokens,), names=("input_ids",), labels=tokens)
        images = torch.zeros(_EXAMPLES, IMAGE_CHANNELS, IMAGE_SIDE, IMAGE_SIDE)
        return ModelBatch(inputs=(images,), names=("pixel_values",), labels=torch.zeros(_EXAMPLES, dtype=torch.int64))

    def unsplit(self, *, seed: int, weights: bool = True) -> tuple[nn.Module, ModelBatch]:  # noqa: ARG002
        """Build the library's own model, with weights of its own."""
        import transformers

        with global_seed(seed):
            module: nn.Module = getattr(transformers, self._family.whole)(self._family.config)
        return module.eval(), self.batch()

    def _unit(self, index: int) -> UnitModule:
        name = self.names[index]
        if index == 0:
            first = self._family.first(name)
            first.reads = (0,)
            return first
        if index == len(self.names) - 1:
            last: UnitModule = self._family.head(name, self._family.config)
            if self._spec.dataset.startswith("chat:"):
                last.reads = (LABELS, COUNTED)
            return last
        return ModuleUnit(name, self._family.block(index - 1))

    def _seeded(self, index: int, seed: int) -> UnitModule:
        with global_seed():
            unit = self._unit(index)
            # Seeded after construction, so that what constructors draw has no effect.
            torch.default_generator.manual_seed(derive_seed(seed, "unit", index))
            self._family.initialize(unit)
            for group, local in unit.shared.items():
                torch.default_generator.manual_seed(derive_seed(seed, "shared", group))
                nn.init.normal_(unit.get_parameter(local), std=_SHARED_STD)
        return unit


class _WithoutDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves tensors as they are that were to be filled at random, by this thread."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, unless it draws."""
        if func.overloadpacket.__name__ in _DRAWS:
            return args[0]
        return func(*args, **(kwargs or {}))
