"""What a schedule is made of; ours and those of installed packages alike."""

from collections.abc import Callable

from spantrain.core.records import Record
from spantrain.schedule.dispatch.machine import DispatchMachine, ReplicaTask
from spantrain.schedule.dispatch.several import SeveralStages, SharedTask
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import Orders


class RegisteredSchedule(Record):
    """A schedule: static, with the orders of all replicas, or decided at run time, with a policy for each."""

    name: str
    description: str
    splits_backward: bool
    """Whether it goes back in I and W on all stages but the first, and so may put W off."""
    orders: Callable[[CutLayout, bool | None], Orders] | None = None
    """Returns the order of every replica. The flag: all backwards as I and W, or none; None: as the schedule has it.
    Micro-batches come by rising sample; raises a `PlanError` where a limit is too small."""
    policy: Callable[[ReplicaTask], DispatchMachine] | None = None
    """Returns the decision machine of one replica."""
    shared_policy: Callable[[SharedTask], SeveralStages] | None = None
    """The same of a device with several stages; None: it has none."""
    shares_devices: bool = False
    """Whether its orders are for devices with several stages, too: one order for all of them, by crew and replica."""
    is_improved: bool = False
    """Whether the search for the order of `critical-path` begins from its orders, too."""

    def __post_init__(self) -> None:
        if (self.orders is None) == (self.policy is None):
            raise ValueError(f"schedule {self.name!r} needs either orders or a policy")
        if self.is_improved and self.orders is None:
            raise ValueError(f"schedule {self.name!r}: only orders can be improved")
