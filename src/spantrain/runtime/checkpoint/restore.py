"""A device's side of resuming: what it needs of a checkpoint, from its own disk and from the others."""

from pathlib import Path

import torch

from spantrain.core.checkpoint import CheckpointContent
from spantrain.core.cluster import Cluster
from spantrain.runtime.checkpoint.holding import RANDOM_TORCH, Holding, put_back, wanted_of
from spantrain.runtime.checkpoint.tensor_file import TensorFiles
from spantrain.runtime.redistribution.exchange import TensorBlock, boxes_of
from spantrain.runtime.redistribution.transfer import ExchangeChannel, ExchangeGroup, TensorExchange


def group_of(cluster: Cluster, own: str, devices: tuple[str, ...]) -> ExchangeGroup:
    """Return the devices of a run as one of them sees them: those of its host are nearest, then those of its site."""
    here = cluster.device_by_name[own]

    def nearness(peer: str) -> int:
        there = cluster.device_by_name[peer]
        return 0 if there.host == here.host else 1 if there.site == here.site else 2

    return ExchangeGroup(own=own, peers=tuple(name for name in devices if name != own), nearness=nearness)


def restore(
    folder: Path,
    content: CheckpointContent,
    holding: Holding,
    optimizer: torch.optim.Optimizer,
    group: ExchangeGroup,
    post: ExchangeChannel | None,
) -> None:
    """Put a device's part of a checkpoint in place, whatever plan it was saved under; all devices do so together.

    Args:
        folder: of the checkpoint on this machine; files of others may be missing.
        content: what the manifest says.
        holding: what this device holds under the new plan.
        optimizer: of the same parameters.
        group: the devices of the run.
        post: between them; None where there is one only.

    Raises:
        ConfigError: it is of another model, a file is damaged, or nobody has what is needed.
    """
    wanted = wanted_of(holding, content.files)
    files = TensorFiles(folder, content.files)
    put_back(holding, optimizer, TensorExchange(group, content.files, files, post).run(wanted))
    _restore_random(files, content, group.own)


def _restore_random(files: TensorFiles, content: CheckpointContent, own: str) -> None:
    """Go on with the random numbers of the device of this name, if its file lies here."""
    for name in files.present():
        stored = content.files[name]
        if stored.device == own and RANDOM_TORCH in stored.tensors:
            (box,) = boxes_of(stored.tensors[RANDOM_TORCH].part)
            (state,) = files.read(name, [TensorBlock(RANDOM_TORCH, box)])
            torch.set_rng_state(state)
