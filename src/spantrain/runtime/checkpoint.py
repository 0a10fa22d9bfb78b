"""Checkpoints: one file a stage, keyed by the unsplit model's names, and a manifest that is written last.

Layout under a run's folder:

    checkpoint/step-30/<device>.safetensors   parameters and optimizer state of one stage
    checkpoint/step-30/manifest.json          the plan, the job, the losses so far, each file's SHA-256
    checkpoint/latest                         the name of the newest complete one
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save_file

from spantrain.config.artefacts import read_artefact, write_artefact
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError

__all__ = [
    "Manifest",
    "finish_checkpoint",
    "latest_checkpoint",
    "read_manifest",
    "read_stage",
    "restore_stage",
    "save_stage",
]

_PARAMETER = "parameter/"
_STATE = "optimizer/"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    """Steps done."""
    plan: Plan
    job: TrainJob
    schedule: str
    profile: str
    """Path of the profile that the plan was made from, or empty."""
    losses: tuple[float, ...]
    """Of every step so far, from the first."""
    files: Mapping[str, str]
    """SHA-256 by file name."""


def save_stage(
    folder: Path, device: str, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[str, str]:
    """Write one stage's parameters and optimizer state; return the file's name and its SHA-256."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        tensors[_PARAMETER + name] = parameter.detach().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{_STATE}{key}/{name}"] = value.detach().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device}.safetensors"
    partial = path.with_suffix(".partial")
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial)
    digest = _sha256(partial)
    partial.replace(path)
    return path.name, digest


def read_stage(folder: Path, device: str) -> bytes:
    """Return the content of one stage's file."""
    path = folder / f"{device}.safetensors"
    if not path.exists():
        raise ConfigError(f"{path} is missing; resume on the machine that wrote it, or from a complete checkpoint")
    return path.read_bytes()


def restore_stage(
    content: bytes, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Put what `save_stage` wrote back, in place."""
    tensors = load(content)
    missing = [name for name in parameters if _PARAMETER + name not in tensors]
    if missing:
        raise ConfigError(f"the checkpoint lacks parameters {missing[:3]}; it belongs to another plan or model")
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(_STATE):
            kind, name = key.removeprefix(_STATE).split("/", 1)
            by_parameter.setdefault(name, {})[kind] = value
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[_PARAMETER + name])
            if name in by_parameter:
                optimizer.state[parameter] = dict(by_parameter[name])


def finish_checkpoint(run_folder: Path, manifest: Manifest) -> Path:
    """Write the manifest, then name the checkpoint as the newest; return its folder."""
    folder = run_folder / "checkpoint" / f"step-{manifest.step}"
    write_artefact(manifest, "spantrain-checkpoint", folder / "manifest.json")
    marker = run_folder / "checkpoint" / "latest"
    partial = marker.with_suffix(".partial")
    partial.write_text(folder.name + "\n")
    os.replace(partial, marker)
    return folder


def latest_checkpoint(run_folder: Path) -> Path:
    """Return the folder of a run's newest complete checkpoint."""
    marker = run_folder / "checkpoint" / "latest"
    if not marker.exists():
        raise ConfigError(f"{run_folder} holds no checkpoint (no {marker}); give the folder that --out named")
    return run_folder / "checkpoint" / marker.read_text().strip()


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest; files that lie here must be whole."""
    manifest = read_artefact(Manifest, "spantrain-checkpoint", folder / "manifest.json", ConfigError)
    for name, digest in manifest.files.items():
        path = folder / name
        if path.exists() and _sha256(path) != digest:
            raise ConfigError(f"{path} was changed or damaged since it was written; use an older checkpoint")
    return manifest


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
