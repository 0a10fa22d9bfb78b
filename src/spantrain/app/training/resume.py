"""What an earlier run left, for one that goes on from it."""

from pathlib import Path

from spantrain.core.checkpoint import CheckpointContent, SampleLedger
from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest
from spantrain.runtime.coordinator.barrier import CommitPoint


class Resume(Record):
    """What an earlier run left."""

    folder: Path
    """Folder of its checkpoint."""
    content: CheckpointContent
    """Its steps among it."""
    losses: tuple[float | None, ...]
    ledger: SampleLedger
    """Which samples were consumed."""
    held: CommitPoint | None = None
    """Where workers hold it in memory, and there is no such checkpoint."""

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> "Resume":
        """Return what a checkpoint holds."""
        return cls(folder=folder, content=manifest.content, losses=manifest.losses, ledger=manifest.ledger)

    @property
    def here(self) -> tuple[str, ...]:
        """Names of its files that lie on this machine."""
        return tuple(name for name in self.content.files if (self.folder / name).is_file())

    @property
    def samples(self) -> int:
        """How many these were."""
        return self.ledger.samples_before(self.content.step)


def newest(run: Path) -> Resume | None:
    """Return the newest complete checkpoint of a run."""
    try:
        folder = latest_checkpoint(run)
    except ConfigError:
        return None
    return Resume.of(folder, read_manifest(folder, check_files=False))
