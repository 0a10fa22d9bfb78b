"""What a family of the catalog is: the parts of one model, made by hand."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import unit_names
from spantrain.models.units import UnitModule


class CatalogFamily(ABC):
    """The parts of one model; each family has a module of its own."""

    whole: str
    """The transformers library's class of the unsplit model."""
    head: type[Any]
    """Of the unit behind the blocks, with the loss; made of its name and the configuration."""

    def __init__(self, spec: ModelSpec) -> None:
        self.config = self.configuration(spec)
        self.blocks = len(unit_names(spec)) - 2

    @staticmethod
    @abstractmethod
    def configuration(spec: ModelSpec) -> Any:
        """Return the transformers configuration: without dropout."""

    @abstractmethod
    def first(self, name: str) -> UnitModule:
        """Build the unit before the blocks; its weights are to be drawn by `initialize`, as those of the others."""

    @abstractmethod
    def block(self, index: int) -> nn.Module:
        """Build a block."""

    @abstractmethod
    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
