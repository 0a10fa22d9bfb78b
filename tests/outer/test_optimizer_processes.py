"""Clusters of two processes: all have the same parameters, bit for bit, and together what one process would have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from preloaded import spawn
from spantrain.library.outer import LocalParameterServer
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.settings import OuterSettings
from testing.outer.clients import EXACT, alone, close
from testing.outer.processes import Order, member


def trained(
    folder: Path, *, samples: int = 0, chunks: int = 0, fragments: int = 1, **order: Any
) -> list[dict[str, Any]]:  # fmt: skip
    settings = OuterSettings(clip_norm=None, grace_s=0.0, fragments=fragments)
    config = MasterConfig(
        shards=("s0",), rule=EXACT, settings=settings, samples=samples, chunks=chunks, passes=1 if samples else None
    )
    with LocalParameterServer(config) as server:
        given = Order(folder=folder, master=server.address, token=server.token, samples=samples, **order)
        spawn(member, args=(given,), nprocs=given.size)
        counted = server.status()
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(given.size)]
    assert all(one["done"] for one in found)
    return [*found, {"status": counted}]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "fragments"), [("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2)])
def test_processes_train_as_one_alone(how, fragments, tmp_path):
    first, second, last = trained(tmp_path, how=how, fragments=fragments)
    for name, one in first["parameters"].items():
        assert torch.equal(one, second["parameters"][name])
    close(first["parameters"], {name: one.detach() for name, one in alone(10).items()})
    assert first["tokens"] == 80
    assert first["rounds"] == last["status"].updates


@pytest.mark.slow
def test_processes_may_have_different_parameters(tmp_path):
    """As a pipeline's stages have; here each trains the whole alone, and shares one of the layers."""
    first, second, last = trained(tmp_path, how="stages")
    for one in (first, second):
        close(one["parameters"], {name: tensor.detach() for name, tensor in alone(10).items()})
    assert [one.tokens for one in last["status"].clusters] == [80]
    assert sum(one.size_bytes for one in last["status"].shards) == 4 * sum(t.numel() for t in alone(0).values())


@pytest.mark.slow
def test_leased_samples_are_dealt_out_once(tmp_path):
    first, second, _ = trained(tmp_path, samples=50, chunks=4)
    # The last batch is filled up by one.
    assert len(first["seen"]) == len(second["seen"])
    assert set(first["seen"]) | set(second["seen"]) == set(range(50))
    assert len(first["seen"] + second["seen"]) - 50 <= 4
