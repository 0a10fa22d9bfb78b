"""The emulated network, for real: processes, sockets and packets in namespaces."""

import json
import os
import pickle
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spantrain.core.cluster import Cluster
from spantrain.errors import TestbedError
from spantrain.testbed.inhabitants import find_inhabitants
from spantrain.testbed.state import State, read_states
from spantrain.testbed.testbed import Testbed, down_all
from spantrain.testbed.traffic import Flow, measure_round_trips, rate_bytes_per_s

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespaces_or_skip")]

MBIT = 1e6 / 8
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = [sys.executable, "-I", "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN);"
            "print('up', flush=True); time.sleep(60)"]  # fmt: skip


def state_of(testbed: Testbed) -> State:
    return next(state for state in read_states() if state.testbed_id == testbed.id)


def start(testbed: Testbed, host: str, command: list[str]) -> "subprocess.Popen[bytes]":
    process = testbed.popen(host, command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def assert_nothing_remains(state: State) -> None:
    assert not state.router.alive
    assert not state.keeper.alive
    assert find_inhabitants(state.networks) == []
    assert not list(Path(state.directory).iterdir())
    held = {os.readlink(path) for path in Path("/proc").glob("[0-9]*/fd/*") if path.is_symlink() and _is_network(path)}
    assert held.isdisjoint(f"net:[{network}]" for network in state.networks)


def _is_network(path: Path) -> bool:
    try:
        return os.readlink(path).startswith("net:")
    except OSError:
        return False


def wait_until_dead(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 10.0)[0], f"{pid} still lives"
    os.close(handle)


def test_hosts_reach_each_other_and_nothing_else(testbed: Testbed) -> None:
    assert len(measure_round_trips(testbed, "cloud-0", "cloud-1", count=2)) == 2
    assert len(measure_round_trips(testbed, "cloud-0", "edge-1", count=2)) == 2
    seen = testbed.popen("edge-0", ["ip", "-json", "route"], stdout=subprocess.PIPE).communicate()[0]
    assert {route.get("gateway") for route in json.loads(seen)} == {None, "10.2.0.1"}
    assert testbed.interface("edge-0") in {name for route in json.loads(seen) for name in [route["dev"]]}


def test_rate_and_round_trip_are_as_asked(testbed: Testbed) -> None:
    round_trip_s = statistics.median(measure_round_trips(testbed, "cloud-0", "edge-0", count=9))
    assert round_trip_s == pytest.approx(0.04, abs=0.004)
    samples = Flow(testbed, "cloud-0", "edge-0", duration_s=2.5).finish()
    measured = rate_bytes_per_s(samples, samples[0][0] + 1.2, samples[-1][0])
    assert measured == pytest.approx(100 * MBIT, rel=0.05)
    link = next(link for link in testbed.status().links if link.source == "cloud")
    assert link.bytes_sent >= samples[-1][1]


def test_a_ping_is_quick_beside_bulk_and_shape_takes_effect_within_a_second(testbed: Testbed) -> None:
    flow = Flow(testbed, "cloud-0", "edge-0", duration_s=1.6, udp_bytes_per_s=110 * MBIT)
    beside_bulk = measure_round_trips(testbed, "cloud-1", "edge-1", count=16)
    assert statistics.median(beside_bulk) == pytest.approx(0.04, abs=0.006)
    changed_s = time.monotonic()
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=20 * MBIT)
    samples = flow.finish()
    assert rate_bytes_per_s(samples, changed_s - 0.3, changed_s) == pytest.approx(100 * MBIT, rel=0.1)
    assert rate_bytes_per_s(samples, changed_s + 0.5, changed_s + 1.0) == pytest.approx(20 * MBIT, rel=0.1)
    testbed.shape("edge", "cloud", latency_s=0.06, jitter_s=0.001, loss_ratio=0.0)
    forth, back = testbed.status().links
    assert (forth.bandwidth_bytes_per_s, forth.latency_s) == (20 * MBIT, 0.02)
    assert (back.bandwidth_bytes_per_s, back.latency_s, back.jitter_s) == (100 * MBIT, 0.06, 0.001)
    assert measure_round_trips(testbed, "cloud-0", "edge-0", count=3)[1] == pytest.approx(0.08, rel=0.1)


def test_lost_packets_are_counted_and_tcp_gets_through(testbed: Testbed) -> None:
    testbed.shape("cloud", "edge", loss_ratio=0.02)
    samples = Flow(testbed, "cloud-0", "edge-0", duration_s=0.6).finish()
    link = testbed.status().links[0]
    assert link.packets_lost > 0
    assert samples[-1][1] > 0


def test_a_process_enters_by_itself_with_an_entrance(testbed: Testbed) -> None:
    entrance = testbed.entrance("edge-1")
    code = (
        "import sys, pickle, os; pickle.loads(bytes.fromhex(sys.argv[1])).enter(); "
        "os.execvp('ip', ['ip', '-4', 'addr'])"
    )
    seen = subprocess.run([sys.executable, "-c", code, pickle.dumps(entrance).hex()], capture_output=True, check=True)
    assert f"inet {testbed.address('edge-1')}/16".encode() in seen.stdout


def test_exit_codes_and_environment_pass_through(testbed: Testbed) -> None:
    assert testbed.popen("edge-0", ["sh", "-c", "exit $CODE"], env={**os.environ, "CODE": "7"}).wait() == 7
    missing = testbed.popen("edge-0", ["no-such-command"], stderr=subprocess.PIPE)
    assert b"no-such-command" in missing.communicate()[1]
    assert missing.returncode == 127
    with pytest.raises(ValueError, match="shell"):
        testbed.popen("edge-0", ["true"], shell=True)


def test_down_leaves_nothing(cluster: Cluster, own_runtime_dir: Path) -> None:
    testbed = Testbed.up(cluster)
    state = state_of(testbed)
    children = [start(testbed, "cloud-0", SLEEP), start(testbed, "edge-1", SLEEP)]
    assert set(find_inhabitants(state.networks)) >= {child.pid for child in children}
    testbed.down()
    assert [child.wait() for child in children] == [-signal.SIGTERM] * 2
    assert_nothing_remains(state)
    testbed.down()
    with pytest.raises(TestbedError, match="does not answer"):
        testbed.status()
    with pytest.raises(ProcessLookupError):
        testbed.entrance("edge-0").enter()


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
    assert child.wait(10) == -signal.SIGTERM
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
    assert child.wait(10) == -signal.SIGTERM
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
    assert child.wait(10) == -signal.SIGTERM
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


def test_what_is_wrong_is_said(testbed: Testbed) -> None:
    with pytest.raises(TestbedError, match="did you mean cloud-0"):
        testbed.address("clud-0")
    with pytest.raises(TestbedError, match=r"no site 'clod'.*did you mean cloud"):
        testbed.shape("clod", "edge", latency_s=0.1)
    with pytest.raises(TestbedError, match="no link cloud -> cloud"):
        testbed.shape("cloud", "cloud", latency_s=0.1)
    with pytest.raises(TestbedError, match="bandwidth must be positive"):
        testbed.shape("cloud", "edge", bandwidth_bytes_per_s=0.0)
    with pytest.raises(TestbedError, match="finite"):
        testbed.shape("cloud", "edge", bandwidth_bytes_per_s=float("inf"))


def test_a_malformed_request_does_not_end_the_router(testbed: Testbed) -> None:
    path = state_of(testbed).file("sock")
    assert path.stat().st_mode & 0o777 == 0o600
    for request in (b"hello\n", b"[]\n", b'{"operation": "fly"}\n', b'{"operation": "shape"}\n', b'{"operation": 1}\n'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(request)
            assert b"error" in connection.makefile("rb").readline()
    assert testbed.status().id == testbed.id
