"""What a checkpoint holds: tensors of the unsplit model, whole or in parts, and the samples that were consumed."""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from spantrain.core.records import Bounds, Record, check_bounds
from spantrain.core.shares import TensorPart

_SHA256 = re.compile(r"[0-9a-f]{64}")


class StoredTensor(Record):
    """One tensor in a file: which part of the whole one, and of which type."""

    part: TensorPart
    dtype: str
    """`float32`, `bfloat16`, ..."""


class StoredFile(Record):
    """What one device wrote."""

    device: str
    """Device that wrote it, on its own machine."""
    sha256: str
    size_bytes: Annotated[int, Bounds(low=0)]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    """By name: `parameter/NAME`, `optimizer/KEY/NAME`, `buffer/NAME`, `random/KIND`; NAME is the unsplit model's."""

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"sha256 has 64 hexadecimal digits, got {self.sha256!r}")
        check_bounds(self)


class CheckpointContent(Record):
    """All that devices must know of a checkpoint to begin with it."""

    step: Annotated[int, Bounds(low=0)]
    """Steps done."""
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    """By name in the checkpoint's folder."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """State that is a number and the same on all devices, such as the loss scale of float16."""

    def __post_init__(self) -> None:
        check_bounds(self)
        strange = [name for name in self.files if "/" in name or name.startswith(".")]
        if strange:
            raise ValueError(f"files lie in the checkpoint's own folder, got {strange}")


class LedgerEntry(Record, where="a ledger entry"):
    """From this step on, until the next entry, each step took so many samples."""

    first_step: Annotated[int, Bounds(low=0)]
    global_batch: Annotated[int, Bounds(low=1)]


class SampleLedger(Record):
    """Which samples were consumed: positions in the sampler's one endless sequence, whoever read them.

    It does not depend on the number of readers, and a run may go on with another global batch.

    >>> ledger = SampleLedger().extended(0, 16).extended(10, 24)
    >>> ledger.samples_before(10), ledger.samples_before(12), ledger.extended(12, 24) == ledger
    (160, 208, True)
    """

    entries: tuple[LedgerEntry, ...] = ()

    def __post_init__(self) -> None:
        steps = [entry.first_step for entry in self.entries]
        if steps and (steps[0] != 0 or steps != sorted(set(steps))):
            raise ValueError(f"a ledger's entries begin at step 0 and rise, got first steps {steps}")

    def samples_before(self, step: int) -> int:
        """Return the number of samples that all steps before this one took."""
        total = 0
        ends = [entry.first_step for entry in self.entries[1:]] + [step]
        for entry, end in zip(self.entries, ends, strict=False):
            total += max(0, min(end, step) - entry.first_step) * entry.global_batch
        return total

    def extended(self, step: int, global_batch: int) -> "SampleLedger":
        """Return the ledger of a run that goes on from this step with this global batch."""
        kept = tuple(entry for entry in self.entries if entry.first_step < step)
        if kept and kept[-1].global_batch == global_batch:
            return SampleLedger(entries=kept)
        assert kept or step == 0, f"the ledger does not know what was read before step {step}"
        return SampleLedger(entries=(*kept, LedgerEntry(first_step=step, global_batch=global_batch)))
