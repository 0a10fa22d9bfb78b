"""Workers that join from elsewhere, and what becomes of everybody when one of them, or the way to them, goes away."""

import contextlib
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from spantrain.app.session import SessionOptions, open_session, wait_for
from spantrain.app.training.recovery.journal import adopted_run, credentials_in
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.errors import PeerLostError
from spantrain.runtime.coordinator.coordinator import Coordinator
from spantrain.runtime.coordinator.roster import DeviceLostError
from spantrain.runtime.launch.launcher import LocalWorkers, WorkerPlacement
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.transport.control.credentials import Credentials
from testing.patience import PATIENCE_S, until
from testing.programs import nothing_is_left, written
from testing.relay import FAR, NEAR, Relay
from testing.runtime.joined import FOREVER, Machines, Steps, two_free_ports
from testing.runtime.runs import OneProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def workers(tmp_path_factory) -> Iterator[LocalWorkers]:
    with LocalWorkers(tmp_path_factory.mktemp("logs")) as found:
        yield found


@pytest.fixture
def machines(workers, law_profile, tmp_path) -> Iterator[Callable[..., Machines]]:
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def make(plan: Plan, lost_after_s: float = 6.0) -> Machines:
            port = two_free_ports()
            coordinator = Coordinator(bind=f"{NEAR}:{port}", devices=plan.devices, heartbeat_timeout_s=lost_after_s)
            coordinator.start()
            relay = Relay(port, port + 1)
            stack.callback(relay.close)
            stack.callback(coordinator.stop)
            return Machines(workers, coordinator, relay, law_profile, tmp_path, pool)

        yield make


def emulated(plan: Plan, speed: float) -> Plan:
    devices = tuple(replace(device, backend="emulated") for device in plan.cluster.devices)
    return replace(plan, cluster=replace(plan.cluster, devices=devices, emulated_speed=speed))


@pytest.fixture(scope="module")
def replicas(make_plan, spec_of) -> Plan:
    """Two; the second has most of the samples, so that the first waits for it in the sum of a step that takes long."""
    return emulated(make_plan(spec_of("gpt2"), [0, 5], [[1, 7]], [[Span(0, 8)]], "critical-path"), 1e-5)


@pytest.fixture(scope="module")
def divided(make_plan, spec_of) -> Plan:
    """Two devices that divide tensors, s0r0 leads."""
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1, 1]], [[Span(0, 4)]], "critical-path")
    (stage,) = plan.stages
    group = replace(stage.replicas[0], devices=("s0r0", "s0r1"), tp_shares=(2.0, 1.0))
    return replace(plan, stages=(replace(stage, replicas=(group,)),))


@pytest.fixture(scope="module")
def stages(make_plan, spec_of) -> Plan:
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, 2), Span(2, 4)]] * 2, "critical-path")


def test_a_worker_that_dies_in_the_first_step_ends_its_replica_too(machines, replicas):
    """Which waits for it inside of torch, in the first sum of the run."""
    run = machines(replicas, lost_after_s=PATIENCE_S)
    result = run.start(replicas)
    until(lambda: any("the first step begins" in note for note in run.told.notes))
    other = run.process("s0r0")
    run.process("s0r1").kill()
    with pytest.raises(PeerLostError, match=r"device s0r1 was lost: its connection closed, .*on its own machine"):
        result.result(PATIENCE_S)
    other.wait(PATIENCE_S)
    assert "device s0r1 was lost: its connection closed" in run.has_said("s0r0")


def test_one_that_is_stopped_on_its_machine_is_lost_whatever_its_replica_says(start, machines, replicas):
    """Which fails in the same moment, in the sum that both are at, and lays it on the other one."""
    run = machines(replicas)
    run.join(replicas, "s0r0")
    join, token = run.coordinator.join_address, run.coordinator.token
    other = start("worker", "--join", join, "--name", "s0r1", "--backend", "emulated", SPANTRAIN_TOKEN=token)
    wait_for(run.coordinator, replicas.devices, PATIENCE_S, run.told)
    result = run.train(replicas)
    until(lambda: run.told.steps)
    other.process.send_signal(signal.SIGINT)
    with pytest.raises(DeviceLostError, match="device s0r1 was lost: it was stopped on its machine"):
        result.result(PATIENCE_S)
    assert other.end()[0] == 130


@pytest.mark.tensor_parallel
def test_a_worker_that_stands_still_holds_up_nobody_and_ends_when_it_goes_on(machines, divided):
    """Its follower waits inside of torch for what it tells."""
    run = machines(divided)
    result = run.start(divided)
    until(lambda: run.told.steps)
    leader, follower = run.process("s0r0"), run.process("s0r1")
    leader.send_signal(signal.SIGSTOP)
    with pytest.raises(PeerLostError, match="device s0r0 was lost: no heartbeat"):
        result.result(PATIENCE_S)
    follower.wait(PATIENCE_S)
    assert "the run was ended: device s0r0 was lost: no heartbeat" in run.has_said("s0r1")
    leader.send_signal(signal.SIGCONT)
    leader.wait(PATIENCE_S)
    assert "was lost: no heartbeat" in run.has_said("s0r0")


def test_an_outage_shorter_than_the_limit_ends_nothing_and_a_longer_one_ends_all(machines, stages):
    """The connections from before the first are of use only later; in the second, workers see what they would see if
    the coordinator had died.
    """
    run = machines(stages)
    result = run.start(stages)
    until(lambda: run.told.steps)
    run.relay.hold_up()
    time.sleep(4.0)  # the outage itself
    run.relay.go_on(late_s=4.0)
    steps = len(run.told.steps)
    until(lambda: len(run.told.steps) > steps + 10)
    assert not result.done()
    processes = [run.process(name) for name in stages.devices]
    run.relay.hold_up()
    for process in processes:
        process.wait(PATIENCE_S)
    for name in stages.devices:
        assert re.search(rf"the coordinator at {FAR}:\d+ was lost: no heartbeat", run.has_said(name))
    with pytest.raises(PeerLostError, match="was lost: no heartbeat"):
        result.result(PATIENCE_S)


def test_who_goes_while_others_are_awaited_is_replaced(machines, stages):
    run = machines(stages, lost_after_s=PATIENCE_S)
    first, second = stages.devices
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for, run.coordinator, stages.devices, PATIENCE_S, run.told, tell=run.told.note)
        run.join(stages, first)
        until(lambda: run.told.notes == [f"Device {first} has joined, 1 of 2"])
        run.process(first).kill()
        until(lambda: len(run.told.notes) == 2)
        assert re.fullmatch(
            rf"Device {first} is gone: its connection closed, and no heartbeat came for .*\. It is waited for again: "
            rf"SPANTRAIN_TOKEN=st1\w+ spantrain worker --join {NEAR}:\d+ --name {first}",
            run.told.notes[1],
        )
        run.join(stages, first, second)
        waiting.result(PATIENCE_S)
    assert len(run.told.notes) == 4
    assert run.told.joined == 2
    result = run.train(stages)
    until(lambda: run.told.steps)
    run.stop.ask()
    assert result.result(PATIENCE_S).interrupted


# As users start them.


def test_the_first_signal_ends_a_wait_on_both_sides(start, stages, law_profile, tmp_path):
    """A worker's frees its name at once; a coordinator's leaves nothing running."""
    where = ("--listen", f"{NEAR}:{two_free_ports()}", "--out", tmp_path / "run")
    coordinator = start("train", written(stages, law_profile, tmp_path), *where)
    coordinator.wait_to_hear("spantrain worker --join")
    found = re.search(r"SPANTRAIN_TOKEN=(st1\w+) spantrain (worker --join \S+ --name) ", "".join(coordinator.said))
    assert found, coordinator.said
    worker = start(*found[2].split(), "s0r0", "--backend", "cpu", SPANTRAIN_TOKEN=found[1])
    coordinator.wait_to_hear("Device s0r0 has joined, 1 of 2")
    worker.process.send_signal(signal.SIGINT)
    coordinator.wait_to_hear(
        "Device s0r0 is gone: it was stopped on its machine. It is waited for again: SPANTRAIN_TOK"
    )
    assert worker.end()[0] == 130, worker.said
    coordinator.process.send_signal(signal.SIGTERM)
    code, said = coordinator.end()
    assert code == 130
    assert "Stopped: at once; there is no checkpoint to go on from" in said
    assert "Stopping after this step" not in said
    assert not (tmp_path / "run").exists(), "neither a lock nor credentials"
    nothing_is_left(coordinator)
    nothing_is_left(worker)


def _signal_all(workers: LocalWorkers, plan: Plan, number: signal.Signals) -> None:
    for name in plan.devices:
        workers.signal(name, number)


@pytest.mark.parametrize("is_killed", [True, False])
def test_workers_go_on_with_what_they_hold_under_a_coordinator_that_is_started_again(
    start, workers, stages, law_profile, tmp_path, is_killed
):
    """The first one is killed, or ends when it hears nobody, so that it tells nobody; nothing was saved."""
    listen, out, steps = f"{NEAR}:{two_free_ports()}", tmp_path / "run", FOREVER
    job = TrainJob(steps=steps, seed=5, learning_rate=0.001, adapter="off")
    words = ("train", written(stages, law_profile, tmp_path), "--listen", listen, "--out", out, "--lost-after", "2 s")
    job_words = ("--steps", steps, "--seed", 5, "--learning-rate", job.learning_rate, "--adapter", "off")
    coordinator = start(*words, *job_words)
    coordinator.wait_to_hear("spantrain worker --join")
    token = Credentials.kept_in(credentials_in(out)).token.text
    for name in stages.devices:
        settings = WorkerSettings(join=listen, token=token, name=name, backend="cpu", keep_s=PATIENCE_S)
        workers.start([WorkerPlacement(settings=settings)])
    coordinator.wait_to_hear("loss")
    if is_killed:
        coordinator.process.kill()
        coordinator.process.wait()
    else:
        _signal_all(workers, stages, signal.SIGSTOP)
        coordinator.wait_to_hear("all are awaited for 60 s")
        coordinator.process.send_signal(signal.SIGTERM)
        code, said = coordinator.end()
        assert code == 1
        assert "workers that live keep what they hold" in said
        assert f"spantrain train --resume {out} --steps {steps} --lost-after '2 s' --listen {listen}" in said
        _signal_all(workers, stages, signal.SIGCONT)
    assert not (out / "checkpoint").exists()
    request, told = adopted_run(out, steps, functions=()), Steps()
    assert request is not None
    assert request.resume is not None
    done = request.resume.content.step
    assert done > 0
    options = SessionOptions(listen=listen, credentials=credentials_in(out))
    request = replace(request, job=replace(request.job, steps=done + 2))
    with open_session(stages.cluster, stages.devices, options, out / "logs", told) as session:
        outcome = train(session, request, StopRequest(), told)
    assert f"Goes on after step {done} with what 2 workers hold; no checkpoint is read" in told.notes
    wanted = OneProcess(stages.model, job, stages.global_batch).train(0, done + 2)
    assert outcome.losses == pytest.approx(wanted, abs=1e-4)
    assert not (out / "coordinator").exists()


def test_a_run_goes_on_where_it_was_under_a_coordinator_that_stood_still(start, workers, stages, law_profile, tmp_path):
    """As where its machine sleeps: all workers take it for lost, and it hears of none of them."""
    listen, out = f"{NEAR}:{two_free_ports()}", tmp_path / "run"
    words = ("train", written(stages, law_profile, tmp_path), "--listen", listen, "--out", out, "--lost-after", "2 s")
    coordinator = start(*words, "--steps", FOREVER, "--adapter", "off")
    coordinator.wait_to_hear("spantrain worker --join")
    token = Credentials.kept_in(credentials_in(out)).token.text
    for name in stages.devices:
        workers.log_of(name).unlink(missing_ok=True)
        settings = WorkerSettings(join=listen, token=token, name=name, backend="cpu", keep_s=PATIENCE_S)
        workers.start([WorkerPlacement(settings=settings)])
    coordinator.wait_to_hear("loss")
    coordinator.process.send_signal(signal.SIGSTOP)
    until(lambda: all("is kept for" in workers.log_of(name).read_text() for name in stages.devices))
    coordinator.process.send_signal(signal.SIGCONT)
    coordinator.wait_to_hear("Training goes on after")
    said = "".join(coordinator.said)
    assert re.search(r"lost \(.*\): step \d+ is trained again", said), said
    assert "goes back" not in said
    assert "all go back" not in said
    coordinator.process.send_signal(signal.SIGTERM)
    coordinator.end()


@pytest.mark.parametrize("workers_live", [True, False])
def test_a_run_goes_on_from_another_machine_when_the_coordinators_is_lost_with_its_disk(
    start, workers, stages, law_profile, tmp_path, workers_live
):
    """With what workers hold; where they have gone too, with what lies on their disks."""
    first, second = (f"{NEAR}:{two_free_ports()}" for _ in range(2))
    out, steps = tmp_path / "run", FOREVER
    job = TrainJob(steps=steps, seed=5, learning_rate=0.001, adapter="off")
    words = ("train", written(stages, law_profile, tmp_path), "--listen", first, "--out", out, "--lost-after", "2 s")
    job_words = ("--steps", steps, "--seed", 5, "--learning-rate", job.learning_rate, "--adapter", "off")
    standby = ("--standby-coordinator", stages.devices[0], "--checkpoint-every", 1)
    coordinator = start(*words, *job_words, *standby)
    coordinator.wait_to_hear("spantrain worker --join")
    token = Credentials.kept_in(credentials_in(out)).token.text

    def join() -> None:
        for name in stages.devices:
            settings = WorkerSettings(
                join=first, or_join=(second,), token=token, name=name, backend="cpu", keep_s=PATIENCE_S,
                folder=str(tmp_path / name),
            )  # fmt: skip
            workers.start([WorkerPlacement(settings=settings)])

    join()
    there = tmp_path / stages.devices[0] / out.relative_to("/")
    coordinator.wait_to_hear("has a copy of the journal: should this machine be lost, go on there by spantrain train")
    until((there / "checkpoint/latest").exists)
    coordinator.process.kill()
    coordinator.process.wait()
    shutil.rmtree(out)
    (tmp_path / "profile.json").unlink()
    if not workers_live:
        for name in stages.devices:
            workers.signal(name, signal.SIGKILL)
        until(lambda: not workers.running)
        join()
    request, told = adopted_run(there, steps, functions=()), Steps()
    assert request is not None
    assert request.resume is not None
    done = request.resume.content.step
    options = SessionOptions(listen=second, credentials=credentials_in(there))
    request = replace(request, job=replace(request.job, steps=done + 2))
    with open_session(stages.cluster, stages.devices, options, there / "logs", told) as session:
        outcome = train(session, request, StopRequest(), told)
    if workers_live:
        assert f"Goes on after step {done} with what 2 workers hold; no checkpoint is read" in told.notes
    else:
        assert any("all go back to the checkpoint after" in note for note in told.notes), told.notes
    wanted = OneProcess(stages.model, job, stages.global_batch).train(0, done + 2)
    assert outcome.losses == pytest.approx(wanted, abs=1e-4)
    assert not (there / "coordinator").exists()
