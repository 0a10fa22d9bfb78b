"""How an emulated network comes, is found, and goes, whoever ends first: nothing of it remains."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from spantrain.core.cluster import Cluster
from spantrain.errors import TestbedError
from spantrain.testbed.control import State, read_states
from spantrain.testbed.namespace_processes import find_processes
from spantrain.testbed.testbed import Testbed, down_all, why_unavailable
from spantrain_studies.testbed_traffic import measure_round_trips
from testing.patience import PATIENCE_S

pytestmark = [pytest.mark.root, pytest.mark.timeout(600), pytest.mark.usefixtures("namespaces_or_skip")]

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(3600)"]
STUBBORN = [sys.executable, "-I", "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN);"
            "print('up', flush=True); time.sleep(3600)"]  # fmt: skip


def state_of(testbed: Testbed) -> State:
    return next(state for state in read_states() if state.testbed_id == testbed.id)


def start(testbed: Testbed, host: str, command: list[str]) -> "subprocess.Popen[bytes]":
    process = testbed.popen(host, command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def family(runtime_dir: Path) -> list[psutil.Process]:
    """All that lives of what was started with this runtime directory: routers, keepers, commands, their children."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("XDG_RUNTIME_DIR") == str(runtime_dir) and process.status() != "zombie":
                found.append(process)
    return found


def assert_nothing_remains(state: State) -> None:
    """Not the numbers of namespaces are looked for, since another testbed's may have them by now, but who made them."""
    assert not state.router.alive
    assert not state.keeper.alive
    assert family(Path(state.directory).parent) == []
    assert not list(Path(state.directory).iterdir())
    held = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    assert held.isdisjoint(f"net:[{network}]" for network in state.networks)


def wait_until_dead(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], PATIENCE_S)[0], f"{pid} still lives"
    os.close(handle)


def test_down_leaves_nothing(cluster: Cluster, own_runtime_dir: Path) -> None:
    testbed = Testbed.up(cluster)
    state = state_of(testbed)
    children = [start(testbed, "cloud-0", SLEEP), start(testbed, "edge-1", SLEEP)]
    assert set(find_processes(state.networks)) >= {child.pid for child in children}
    testbed.down()
    assert [child.wait() for child in children] == [-signal.SIGTERM] * 2
    assert_nothing_remains(state)
    testbed.down()
    with pytest.raises(TestbedError, match="does not answer"):
        testbed.status()
    with pytest.raises(ProcessLookupError):
        testbed.namespace("edge-0").enter()


def test_down_kills_what_does_not_listen(cluster: Cluster, own_runtime_dir: Path) -> None:
    testbed = Testbed.up(cluster)
    child = start(testbed, "cloud-0", STUBBORN)
    testbed.down()
    assert child.wait() == -signal.SIGKILL


def test_a_killed_router_takes_everything_with_it(cluster: Cluster, own_runtime_dir: Path) -> None:
    testbed = Testbed.up(cluster)
    state = state_of(testbed)
    child = start(testbed, "cloud-0", SLEEP)
    os.kill(state.router.pid, signal.SIGKILL)
    assert child.wait(PATIENCE_S) == -signal.SIGTERM
    wait_until_dead(state.keeper.pid)
    testbed.down()
    assert_nothing_remains(state)


def test_down_clears_up_when_router_and_keeper_were_killed(cluster: Cluster, own_runtime_dir: Path) -> None:
    testbed = Testbed.up(cluster)
    state = state_of(testbed)
    child = start(testbed, "cloud-0", SLEEP)
    for process in (state.keeper, state.router):
        os.kill(process.pid, signal.SIGKILL)
        wait_until_dead(process.pid)
    assert down_all() == (testbed.id,)
    assert child.wait(PATIENCE_S) == -signal.SIGTERM
    assert_nothing_remains(state)
    assert down_all() == ()


def test_what_a_running_program_uses_is_left_alone(cluster: Cluster, own_runtime_dir: Path) -> None:
    with Testbed.up(cluster) as ours:
        assert down_all() == ()
        assert Testbed.attach().id == ours.id, "there is no other"
        with Testbed.up(cluster, detached=True) as other:
            assert Testbed.attach().id == other.id
            assert down_all() == (other.id,)
        assert len(measure_round_trips(ours, "cloud-0", "edge-0", count=1)) == 1


def test_it_goes_when_its_parent_dies(own_runtime_dir: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from conftest import make_cluster\n"
        "from spantrain.testbed.testbed import Testbed\n"
        "print(Testbed.up(make_cluster()).id, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    testbed_id = parent.stdout.readline().decode().strip()
    (state,) = read_states()
    assert state.testbed_id == testbed_id
    child = start(Testbed.attach(), "edge-0", SLEEP)
    parent.kill()
    parent.communicate()
    assert child.wait(PATIENCE_S) == -signal.SIGTERM
    wait_until_dead(state.keeper.pid)
    assert_nothing_remains(state)


def test_detached_testbeds_are_found_by_name(cluster: Cluster, own_runtime_dir: Path) -> None:
    with pytest.raises(TestbedError, match="no testbed is running"):
        Testbed.attach()
    with Testbed.up(cluster, detached=True) as first:
        assert Testbed.attach().id == first.id
        with Testbed.up(cluster, detached=True) as second:
            assert Testbed.attach(second.id).id == second.id
            with pytest.raises(TestbedError, match="2 testbeds are running"):
                Testbed.attach()
            assert len(measure_round_trips(second, "cloud-0", "edge-0", count=1)) == 1
        assert len(measure_round_trips(first, "cloud-0", "edge-0", count=1)) == 1


def test_a_malformed_request_does_not_end_the_router(testbed: Testbed) -> None:
    path = state_of(testbed).file("sock")
    assert path.stat().st_mode & 0o777 == 0o600
    for request in (b"hello\n", b"[]\n", b'{"operation": "fly"}\n', b'{"operation": "shape"}\n', b'{"operation": 1}\n'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(request)
            assert b"error" in connection.makefile("rb").readline()
    assert testbed.status().id == testbed.id


def test_programs_may_find_out_at_once_whether_a_testbed_can_be_built(own_runtime_dir: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: why_unavailable(), range(4))) == [None] * 4
    assert not list(own_runtime_dir.iterdir())
