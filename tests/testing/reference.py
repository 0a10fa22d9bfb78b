"""A made-up folder of measured runs: a model of four layers, two kinds of devices, figures easy to reckon with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spantrain_studies.reference.platform import Platform

HIDDEN, SEQUENCE, WORDS = 4, 2, 10
PARAMETERS = [WORDS * HIDDEN + SEQUENCE * HIDDEN, 100.0, 100.0, 48.0]
FORWARD_S, BACKWARD_S, UPDATE_S = [0.1, 1.0, 1.0, 0.5], [0.0, 2.0, 2.0, 1.0], 0.01
"""Of a micro-batch of two samples on the fast kind; the slow one takes twice as long."""
MESSAGE_S = 0.1
"""Of two samples between any two hosts."""
BANDWIDTH = 4 * HIDDEN * SEQUENCE * 2 / MESSAGE_S

PLAIN = Platform(
    name="plain",
    launch_exposure=1.0,
    relaunched_layers=0.0,
    buffer_bytes=0.0,
    bytes_per_parameter=24.0,
    workspace_ratio=2.0,
    base_bytes={"other": 1000.0},
)
"""Adds nothing to times but what sending and receiving take."""

Files = dict[str, Any]


def case(name: str, stages: list[tuple[list[int], list[str]]], **changes: Any) -> dict[str, Any]:
    """Return a run; stages are layers and the kinds of their replicas."""
    replicas = len(stages[0][1])
    return {
        "id": name,
        "set": "made-up",
        "model": "toy",
        "nodes": len(stages) * replicas,
        "global_batch": 8 * replicas,
        "microbatch": 2,
        "stages": [
            {"layers": layers, "replicas": [{"gpu": kind, "zone": "here", "tp": 1} for kind in kinds]}
            for layers, kinds in stages
        ],
        "measured_iteration_s": 30.0,
        "measured_gradient_reduction_s": 0.0,
        "measured_peak_memory_bytes": 10000,
        "flags": [],
    } | changes


def files(*cases: dict[str, Any]) -> Files:
    """Return the files of a folder, before they become text."""
    return {
        "measured.json": {"description": "made up", "cases": list(cases)},
        "profiles_toy.json": profile(),
        "network.json": {
            "inter_node": [
                {
                    "send_zone": "here",
                    "send_gpu": a,
                    "send_gpu_count": 1,
                    "recv_zone": "here",
                    "recv_gpu": b,
                    "recv_gpu_count": 1,
                    "coeffs": [BANDWIDTH / 1e9],
                    "max_bandwidth_bytes_per_s": BANDWIDTH,
                }
                for a in ("fast", "slow")
                for b in ("fast", "slow")
            ],
            "intra_node": [],
        },
        "prices.json": {
            "cluster": {kind: {"gpus_per_node": 1, "mem_per_gpu": 10**9} for kind in ("fast", "slow")}
            | {"zone": "here"}
        },
    }


def profile() -> dict[str, Any]:
    """Return the model's profile."""

    def times(factor: float) -> dict[str, Any]:
        return {
            "1": {
                "forward_s": [factor * seconds for seconds in FORWARD_S],
                "backward_s": [factor * seconds for seconds in BACKWARD_S],
                "update_s": [UPDATE_S] * 4,
            }
        }

    return {
        "layer_roles": ["embedding", "transformer_block", "transformer_block", "output_head"],
        "training_config_in_repository": {
            "hidden_size": HIDDEN,
            "sequence_length": SEQUENCE,
            "max_position_embeddings": SEQUENCE,
        },
        "memory_by_tp": {
            "1": {
                "params_floats": PARAMETERS,
                "act_output_floats": [HIDDEN * SEQUENCE] * 4,
                "act_mem_floats": [8, 50, 50, 30],
            }
        },
        "timing_by_gpu": {
            "fast": {"simulator": {"1": times(0.5), "2": times(1.0)}},
            "slow": {"simulator": {"1": times(1.0), "2": times(2.0)}},
        },
    }


def write(folder: Path, content: Files, change: Callable[[Files], object] | None = None) -> Path:
    """Write the files, after a change to them; a file whose content is text is written as it is."""
    if change is not None:
        change(content)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder
