"""What the stages of a pipeline tell each other at a step's end, where it is one cluster of the outer optimizer.

Each stage's first device moves its own layers; one of them, the leader, speaks for the cluster. At every boundary each
says how far it is, and the leader orders what all do there, before the next step. What is said is the state, not what
has changed in it, so that saying it again does no harm.
"""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from spantrain.core.outer.events import Ticket
from spantrain.core.records import Bounds, Record, check_bounds
from spantrain.errors import UsageError

_PREFIX = "SPANTRAIN_OUTER_"
_NEEDED = ("MASTER", "TOKEN", "CLUSTER")
_SWITCH = {"1": True, "0": False}
INNER_STEPS = 64
"""Between two pushes of a cluster, unless it is said."""


class OuterCluster(Record):
    """As whom a run takes part in an outer optimizer."""

    master: str
    """HOST:PORT; all devices that lead a stage must reach it, and the shards."""
    token: str = field(repr=False)
    cluster: str
    inner_steps: Annotated[int, Bounds(low=1)] = INNER_STEPS
    """Between two pushes."""
    encrypted: bool = True
    """Whether layers are."""

    def __post_init__(self) -> None:
        if not (self.master and self.token and self.cluster):
            raise ValueError("an outer cluster needs a master's address, a token and a name")
        check_bounds(self)

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment by which `spantrain outer run` tells a cluster's training command of it."""
        told = {"MASTER": self.master, "TOKEN": self.token, "CLUSTER": self.cluster}
        told |= {"INNER_STEPS": str(self.inner_steps), "ENCRYPTED": "1" if self.encrypted else "0"}
        return {_PREFIX + name: text for name, text in told.items()}

    @classmethod
    def read(cls, variables: Mapping[str, str], *, inner_steps: int = INNER_STEPS) -> "OuterCluster":
        """Read what `os.environ` holds; `inner_steps`: where it says nothing of them.

        Raises:
            UsageError: a variable is missing or makes no sense; all such variables are in the message.

        >>> told = OuterCluster(master="m:7000", token="st1", cluster="a", inner_steps=16)
        >>> OuterCluster.read(told.variables) == told
        True
        """
        names = (*_NEEDED, "INNER_STEPS", "ENCRYPTED")
        text = {name: variables.get(_PREFIX + name, "").strip() for name in names}
        problems = [f"{_PREFIX}{name} is not set" for name in _NEEDED if not text[name]]
        steps, encrypted = text["INNER_STEPS"], text["ENCRYPTED"] or "1"
        if steps and not re.fullmatch(r"[1-9]\d{0,8}", steps, re.ASCII):
            problems.append(f"{_PREFIX}INNER_STEPS is {steps!r}, wanted a whole number from 1")
        if encrypted not in _SWITCH:
            problems.append(f"{_PREFIX}ENCRYPTED is {encrypted!r}, wanted 1 or 0")
        if problems:
            raise UsageError(
                f"environment: {'; '.join(problems)}; start the command with `spantrain outer run`, which sets them"
            )
        return cls(
            master=text["MASTER"],
            token=text["TOKEN"],
            cluster=text["CLUSTER"],
            inner_steps=int(steps) if steps else inner_steps,
            encrypted=_SWITCH[encrypted],
        )


class StageOrder(Record):
    """What all stages do behind a step, in this order."""

    skipped: bool = False
    """The last push came to nothing: go on from the same start."""
    pull: Ticket | None = None
    """Take the version that this pull brought; None: none."""
    version: int = 0
    """Its number."""
    counted: bool = False
    """Whether the last push is part of it."""
    left_out: bool = False
    """Whether that push was left out of its update."""
    push: int = 0
    """Copy the parameters for the push of this number; 0: none."""
    over: bool = False
    """Outside of steps: what was waited for is there, or the time is over."""
    floor: Ticket | None = None
    """No pull before this one will be taken any more."""


class StageReport(Record):
    """How far a stage is, as its first device says."""

    connected: bool = False
    """Whether the master knows it."""
    taken: int = 0
    """The last push for which it copied its parameters."""
    sent: Ticket | None = None
    """The last push of which all of its layers have left."""
    whole: Ticket | None = None
    """The last pull of which all of its layers are here."""
    order: StageOrder | None = None
    """The leader's."""


class StageMeeting(Record):
    """What all stages said at a boundary; the same for each of them."""

    reports: Mapping[str, StageReport]
    """By device."""

    def __post_init__(self) -> None:
        leaders = [name for name, report in self.reports.items() if report.order is not None]
        if len(leaders) != 1:
            raise ValueError(f"one device leads the stages of a cluster, got {', '.join(sorted(leaders)) or 'none'}")

    @property
    def order(self) -> StageOrder:
        """What all do now."""
        return next(report.order for report in self.reports.values() if report.order is not None)
