"""Which update rules there are, by name: what each file of this folder defines, and what others define elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from spantrain.config.files.json_codec import NamedKinds
from spantrain.core.records import check_bounds
from spantrain.plugins import modules_of

if TYPE_CHECKING:
    from torch import Tensor


class OuterRule(NamedKinds, ABC):
    """How a shard steps along the mean pseudo-gradient; a frozen dataclass of its numbers, with their bounds.

    Files of rules are loaded to read outer.yaml, so they load torch only where they compute.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    """What a shard keeps of each parameter from step to step: tensors of its shape, 0 at first, in every snapshot."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @classmethod
    def kinds(cls) -> "Mapping[str, type[OuterRule]]":
        """Return all rules by name."""
        modules_of(__name__.rpartition(".")[0])
        return {one.name: one for one in OuterRule.__subclasses__()}

    @abstractmethod
    def step(self, ahead: "Tensor", old: Sequence["Tensor"], new: Sequence["Tensor"], part: float) -> float:
        """Make a block of the mean, in place, what is to be subtracted; write what is kept; return by which rate.

        Args:
            ahead: the clipped mean times `part`
            old: what was kept, in the order of `slots`
            new: where to write what is to be kept
            part: of a step that all clusters would make together
        """


rules = OuterRule.kinds
"""All rules by name."""
