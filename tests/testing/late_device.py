"""A device on the processor whose results come later, as those of a device with streams do.

Work is done when it is handed over, but what it has made is there only when it is over: who reads it before reads
numbers that are none.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from spantrain.devices.base import ComputeDevice, Submitted


@dataclass(kw_only=True)
class Later(Submitted[Any]):
    """Over when it was looked at often enough, and all before it are over."""

    before: "Later | None"
    looks: int
    coming: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        if self.before is not None and not self.before.is_over:
            return False
        self.looks -= 1
        if self.looks < 0:
            self.wait()
        return self.looks < 0

    def wait(self) -> None:
        if self.before is not None:
            self.before.wait()
        self.looks, self.before = -1, None
        if self.coming:
            self.ended_s = time.monotonic()
        for landing, value in self.coming:
            landing.copy_(value)
        self.coming = []

    def landing_of(self, made: Any) -> Any:
        """Return where something will be: numbers that are none until then."""
        if not isinstance(made, Tensor) or not made.is_floating_point():
            return made
        landing = torch.full_like(made, torch.nan)
        self.coming.append((landing, made.detach()))
        return landing


class LateDevice(ComputeDevice):
    """Takes two pieces of work at once."""

    ahead = 2

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self._random = Random(seed)
        self._last: Later | None = None
        self.handed_over_early = 0
        """Pieces of work that came while another one was not over."""

    def submit(self, work: Callable[[], Any], seconds: float | None, besides: Any = None) -> Submitted[Any]:
        before = self._last if self._last is not None and self._last.looks >= 0 else None
        self.handed_over_early += before is not None
        now_s, looks = time.monotonic(), self._random.randint(0, 3)
        later = Later(result=None, started_s=now_s, ended_s=now_s, before=before, looks=looks)
        later.result = tree_map(later.landing_of, work())
        self._last = later
        return later

    def run(self, work: Callable[[], Any], seconds: float | None, besides: Any = None) -> Any:
        later = self.submit(work, seconds, besides)
        later.wait()
        return later.result
