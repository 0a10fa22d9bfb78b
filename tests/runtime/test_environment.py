"""What environment variables say, and what is nonsense."""

import subprocess
import sys

import pytest

from spantrain.errors import UsageError
from spantrain.runtime.launch.environment import Environment, Launch
from spantrain.transport.control.credentials import JoinToken

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


def test_nothing_is_said() -> None:
    assert Environment.read({}) == Environment()
    assert Environment.read({"RANK": "", "SPANTRAIN_JOIN": " ", "MASTER_ADDR": "left-over"}) == Environment()


def test_torchrun() -> None:
    launch = Launch(rank=3, world_size=8, local_rank=1, master_address="node-0", master_port=29500)
    assert Environment.read(TORCHRUN) == Environment(launch=launch)


def test_a_launcher_may_leave_out_the_local_rank() -> None:
    launch = Environment.read({**TORCHRUN, "LOCAL_RANK": ""}).launch
    assert launch is not None
    assert launch.local_rank is None


def test_joining() -> None:
    token = JoinToken.create(b"certificate").text
    environment = Environment.read({"SPANTRAIN_JOIN": "head:29400", "SPANTRAIN_TOKEN": token})
    assert environment.join_token == token
    assert token not in repr(environment)


@pytest.mark.parametrize("text", ["0,1", "", "-1", "2,-1,2", "GPU-8932f937-d72c"])
def test_cuda_devices(text: str) -> None:
    assert Environment.read({"CUDA_VISIBLE_DEVICES": text}) == Environment()


def test_gloo_interfaces() -> None:
    assert Environment.read({"GLOO_SOCKET_IFNAME": "eth0, eth1"}) == Environment(gloo_interfaces="eth0, eth1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK is '8', wanted a whole number from 0 to 7"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"RANK": "٣"}, "RANK is"),
        ({"RANK": ""}, "RANK not set: a launcher sets all of"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', wanted a whole number from 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000', wanted a whole number from 1 to 65535"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT not set"),
        ({"GLOO_SOCKET_IFNAME": "eth 0"}, "GLOO_SOCKET_IFNAME is 'eth 0'"),
        ({"CUDA_VISIBLE_DEVICES": "cuda:0"}, "CUDA_VISIBLE_DEVICES is 'cuda:0'"),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, "named twice"),
        ({"SPANTRAIN_JOIN": "head"}, "SPANTRAIN_JOIN: 'head' is not an address: write HOST:PORT"),
        ({"SPANTRAIN_TOKEN": "hunter2"}, "SPANTRAIN_TOKEN: the join token is cut or mistyped"),
    ],
)
def test_nonsense(change: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Environment.read({**TORCHRUN, **change})
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_all_nonsense_is_in_one_message() -> None:
    with pytest.raises(UsageError, match=r"RANK is .*MASTER_PORT is .*CUDA_VISIBLE_DEVICES is .*SPANTRAIN_JOIN"):
        Environment.read(
            {**TORCHRUN, "RANK": "x", "MASTER_PORT": "x", "CUDA_VISIBLE_DEVICES": "x", "SPANTRAIN_JOIN": "x"}
        )


def test_reading_the_environment_imports_neither_grpc_nor_torch() -> None:
    code = "import sys, spantrain.runtime.launch.environment; sys.exit(bool({'grpc', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
