"""`spantrain init` as processes that torchrun has started: each tells of its machine, rank 0 writes."""

import os
import socket
import subprocess
import sys

from spantrain.config.cluster_file import load_cluster
from testing.patience import PATIENCE_S


def test_rank_0_writes_what_all_machines_told(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "spantrain", "init", "--torchrun", "--out", str(tmp_path / f"{rank}.yaml")],
            env={**os.environ, **said, "RANK": str(rank), "LOCAL_RANK": local},
            stderr=subprocess.PIPE,
        )
        for rank, local in enumerate("001")
    ]
    ends = [(process.communicate(timeout=PATIENCE_S)[1].decode(), process.returncode) for process in running]
    assert [code for _, code in ends] == [0, 0, 0], ends
    assert [path.name for path in tmp_path.iterdir()] == ["0.yaml"]
    cluster = load_cluster(tmp_path / "0.yaml")
    first, second = (host.name for host in cluster.hosts)
    assert second == f"{first}-2", "two machines of one name, each once"
    assert len(cluster.sites) == 1
    assert "# networks and links are assumed" in (tmp_path / "0.yaml").read_text()
