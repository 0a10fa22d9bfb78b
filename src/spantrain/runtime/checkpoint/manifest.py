"""The manifest that makes a checkpoint complete, and the marker that names the newest one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spantrain.config.artefacts import CHECKPOINT_FORMAT, artefact_text, read_artefact
from spantrain.config.files.text_files import read_text
from spantrain.core.checkpoint import CheckpointContent, SampleLedger, StoredFile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.runtime.checkpoint.storage import Storage, write_named
from spantrain.runtime.checkpoint.tensor_file import TensorFiles

CHECKPOINTS = "checkpoint"
"""Name of the folder in a run's folder."""
MANIFEST_FILE = "manifest.json"
MARKER = "latest"
_EXAMPLE = "step-10"
_FOLDER = re.compile(r"step-(\d{1,18})")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and the run that it is of."""

    step: int
    """Steps done."""
    model: ModelSpec
    plan: Plan | None
    """That was trained; None: it was imported, no run has begun."""
    job: TrainJob | None
    """None where `plan` is None."""
    profile: str
    """Path of the profile that the plan was made from, or empty."""
    losses: tuple[float, ...]
    """Of every step so far, from the first."""
    ledger: SampleLedger
    """Which samples were consumed."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """State that is a number, the same on all devices."""
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    """By name in the checkpoint's folder, on the machine of the device that wrote it."""
    calm_plan: Plan | None = None
    """That was made for links as planned, where another one has taken over from it."""

    def __post_init__(self) -> None:
        if (self.plan is None) != (self.job is None):
            raise ValueError("plan and job belong together: give both or neither")
        CheckpointContent(step=self.step, files=self.files)

    @property
    def content(self) -> CheckpointContent:
        """What devices need to know of it."""
        return CheckpointContent(step=self.step, files=self.files, scalars=self.scalars)


def step_of(folder: Path) -> int | None:
    """Return the step that a checkpoint's folder is named for; None of any other name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def write_manifest(storage: Storage, folder: Path, manifest: Manifest) -> None:
    """Write the manifest; the checkpoint is complete when this returns.

    Raises:
        OSError: it cannot be written.
    """
    _write(storage, folder / MANIFEST_FILE, artefact_text(manifest, CHECKPOINT_FORMAT))


def write_marker(storage: Storage, folder: Path) -> None:
    """Name a complete checkpoint as the newest of its run.

    Raises:
        OSError: it cannot be written.
    """
    _write(storage, folder.parent / MARKER, folder.name + "\n")


def _write(storage: Storage, path: Path, text: str) -> None:
    write_named(storage, path.parent, path.name, [text.encode()], lambda _digest: path.name)


def latest_checkpoint(run_folder: Path) -> Path:
    """Return the folder of a run's newest complete checkpoint.

    Raises:
        ConfigError: there is none.
    """
    marker = run_folder / CHECKPOINTS / MARKER
    if not marker.is_file():
        raise ConfigError(f"{run_folder} holds no checkpoint (no {marker}); give the folder that --out named")
    folder = (
        marker.parent
        / read_text(marker, remedy=f"write the name of a complete one into it, such as {_EXAMPLE}").strip()
    )
    if step_of(folder) is None:
        raise ConfigError(
            f"{marker}: names no checkpoint; write the name of a complete one into it, such as {_EXAMPLE}"
        )
    return folder


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """Read a checkpoint's manifest, and check all files that lie here against it, unless that is done elsewhere.

    Raises:
        ConfigError: it is missing or wrong, or a file was damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} is no complete checkpoint ({MANIFEST_FILE} is missing); name another one in "
            f"{folder.parent / MARKER}"
        )
    manifest = read_artefact(Manifest, CHECKPOINT_FORMAT, path, ConfigError)
    files = TensorFiles(folder, manifest.files)
    for name in files.present() if check_files else ():
        files.check(name)
    return manifest
