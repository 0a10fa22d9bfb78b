"""Workers of this machine that end: who hears of it, and others in their place."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import wait_for
from spantrain.errors import PeerLostError
from spantrain.runtime.coordinator.coordinator import Coordinator
from spantrain.runtime.launch import launcher
from spantrain.runtime.launch.launcher import LocalWorkers, WorkerPlacement
from spantrain.runtime.worker.settings import WorkerSettings
from testing.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def workers(tmp_path_factory) -> Iterator[LocalWorkers]:
    with LocalWorkers(tmp_path_factory.mktemp("logs")) as found:
        yield found


@pytest.fixture
def coordinator(workers, tmp_path) -> Iterator[Coordinator]:
    """Of two devices, whose workers end silently but for what their starter says."""
    found = Coordinator(
        bind=f"unix:{tmp_path}/join", devices=("a", "b"), starter=workers, heartbeat_timeout_s=PATIENCE_S
    )
    found.start()
    yield found
    found.stop()


def placement(coordinator: Coordinator, name: str) -> WorkerPlacement:
    settings = WorkerSettings(join=coordinator.join_address, token=coordinator.token, name=name, backend="cpu")
    return WorkerPlacement(settings=settings)


def process_of(log: Path) -> psutil.Process:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/1") == str(log):
                    return process
    raise AssertionError(f"nobody writes {log}")


def test_what_is_loaded_before_workers_are_forked_runs_no_thread(workers):
    """As gRPC and ZeroMQ do as soon as they are used; both break in forks then."""
    workers.start([])  # waits until all is loaded
    assert psutil.Process(workers._server.pid).num_threads() == 1


def test_what_the_user_has_forked_holds_up_no_end(tmp_path):
    """A DataLoader's workers have all that this process had open when they began, the pipe to the fork server, too."""
    found = LocalWorkers(tmp_path)
    found.start([])
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    try:
        begun_s = time.monotonic()
        found.close()
        assert time.monotonic() - begun_s < launcher._END_TIMEOUT_S / 2
        assert found._server.returncode == 0
        found.close()
    finally:
        forked.kill()
        forked.join()


def test_a_killed_worker_is_told_of_once_and_another_one_takes_its_place(workers, coordinator):
    for _ in range(2):
        workers.start([placement(coordinator, name) for name in coordinator.missing(("a", "b"))])
        wait_for(coordinator, ("a", "b"), PATIENCE_S, SilentReporter())
        process_of(workers.log_of("a")).kill()
        while not (ended := workers.ended()):
            time.sleep(0.01)
        assert ended == {"a": "its worker was killed by signal 9"}
        assert workers.ended() == {}
        workers.check()
        workers.start([placement(coordinator, "a")])
        process_of(workers.log_of("a")).kill()
        while coordinator.missing(("a", "b")) != ["a"]:
            time.sleep(0.01)
        assert workers.ended() == {}


def test_one_that_ends_while_it_is_awaited_is_waited_for_no_longer(workers, coordinator):
    workers.start([placement(coordinator, "b")])
    process_of(workers.log_of("b")).kill()
    log = workers.log_of("b")
    with pytest.raises(PeerLostError, match=f"^device b was lost: its worker was killed by signal 9; its log: {log}$"):
        wait_for(coordinator, ("a", "b"), PATIENCE_S, SilentReporter())
