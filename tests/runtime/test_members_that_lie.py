"""Members of a run that say what is not so: against a real coordinator, over its real port."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from spantrain.config.files.json_codec import to_json
from spantrain.core.checkpoint import StoredFile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.errors import SpanTrainError, WorkerError
from spantrain.runtime.checkpoint.coordinator_files import CoordinatorFiles
from spantrain.runtime.control.orders import TrainOrder
from spantrain.runtime.control.plane import OrderRequest
from spantrain.runtime.control.requests import REQUESTS, DeviceReport, SavedFile
from spantrain.runtime.coordinator.barrier import StepBarrier, StepOutcome
from spantrain.runtime.coordinator.coordinator import Coordinator
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.protocol import RemoteRefusal
from testing.models.graphs import graph_of
from testing.patience import PATIENCE_S

HONEST, LIAR, IDLE = "s0r0", "s1r0", "s1r1"
HERE = {"endpoint": "tcp://10.0.0.7:4711", "public_key": "k" * 40}


@dataclass
class Run:
    """A run of two devices, which are clients of this test; a third one has no part in it."""

    coordinator: Coordinator
    clients: dict[str, ControlClient]
    plan: Plan
    saved: list[SavedFile] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)

    def ask(self, device: str, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self.clients[device].call(method, payload, timeout_s=PATIENCE_S)

    def train(self, order: TrainOrder) -> dict[str, dict[str, Any]]:
        def on_saved(saved: SavedFile) -> tuple[int, ...]:
            self.saved.append(saved)
            return ()

        files = CoordinatorFiles(Path(), takes=False, tell=print, on_saved=on_saved)
        barrier = StepBarrier(
            plan=self.plan,
            job=order.job,
            stop_requested=lambda: False,
            on_step=self.outcomes.append,
            can_checkpoint=True,
            hold_s=0.0,
        )
        return self.coordinator.train({HONEST: order, LIAR: order}, barrier, files, lambda: False)

    def refused(self, device: str, method: str, payload: dict[str, Any], says: str) -> None:
        with pytest.raises(SpanTrainError, match=says):
            self.ask(device, method, payload)


@pytest.fixture
def run(make_plan, spec_of, tmp_path: Path) -> Iterator[Run]:
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, 4)]] * 2, "gpipe")
    bind, devices = f"unix:{tmp_path}/join", (HONEST, LIAR, IDLE)
    coordinator = Coordinator(bind=bind, devices=devices, heartbeat_timeout_s=PATIENCE_S)
    with contextlib.ExitStack() as stack:
        coordinator.start()
        clients = {}
        for name in (HONEST, LIAR, IDLE):
            clients[name] = ControlClient.join(coordinator.join_address, coordinator.token, name=name, facts={})
            stack.callback(clients[name].close)
            clients[name].call("introduce", HERE, timeout_s=PATIENCE_S)
        stack.callback(coordinator.stop)
        yield Run(coordinator, clients, plan)
        for client in clients.values():
            with contextlib.suppress(SpanTrainError):
                client.call("leave", {}, timeout_s=PATIENCE_S)


@pytest.fixture
def under_way(run: Run) -> Iterator[tuple[Run, "Future[Any]"]]:
    """A run whose two devices have taken their orders and ended the first step, behind which they save."""
    order = TrainOrder(
        plan=run.plan,
        graph=graph_of(run.plan.model),
        job=TrainJob(steps=9, checkpoint_every=1),
        peers=run.coordinator.peers((HONEST, LIAR)),
        output_dir="nowhere",
    )
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run.train, order)
        orders = {name: run.ask(name, "next_order", {"after": -1})["order"] for name in (HONEST, LIAR)}
        for name in (HONEST, LIAR):
            run.ask(name, "commit_step", to_json(report(0)))
        yield run, result
        if not result.done():
            number = orders[HONEST]["order_id"]
            over = {"after": number, "outcome": {"order_id": number, "failure": {"error": "the test is over"}}}
            call = run.clients[HONEST].begin("next_order", over, timeout_s=PATIENCE_S)
            with pytest.raises(WorkerError, match=f"device {HONEST} failed: the test is over"):
                result.result(PATIENCE_S)
            call.cancel()


def report(step: int, generation: int = 1) -> DeviceReport:
    return DeviceReport(
        generation=generation, step=step, loss_sum=1.0, grad_square=1.0, busy_s=0.1, peak_held_samples=1
    )


def saved_by(device: str, step: int) -> SavedFile:
    digest = "0123456789ab" + "0" * 52
    file = StoredFile(device=device, sha256=digest, size_bytes=1)
    return SavedFile(step=step, name=f"{device}-0123456789ab.safetensors", file=file, scalars={})


def test_invented_checkpoints_remove_nothing(under_way):
    run, _ = under_way
    for step in (10**15, 10**15 + 1, 10**15 + 2, 0, 2, -1):
        run.refused(LIAR, "checkpoint_saved", to_json(saved_by(LIAR, step)), "was not told to save|negative")
    run.refused(LIAR, "checkpoint_saved", to_json(saved_by(HONEST, 1)), f"{LIAR} has not written {HONEST}-0123")
    elsewhere = replace(saved_by(LIAR, 1), name="../../latest")
    run.refused(LIAR, "checkpoint_saved", to_json(elsewhere), "has not written")
    run.refused(IDLE, "checkpoint_saved", to_json(saved_by(IDLE, 1)), "has no order")
    assert run.saved == []
    run.ask(LIAR, "checkpoint_saved", to_json(saved_by(LIAR, 1)))
    assert run.saved == [saved_by(LIAR, 1)]


def test_only_reports_of_the_step_that_is_under_way_count(under_way):
    run, _ = under_way
    for step, generation in ((10**15, 1), (2, 1), (1, 0), (1, 2)):
        run.refused(LIAR, "commit_step", to_json(report(step, generation)), "under way is step 1 under generation 1")
    run.refused(IDLE, "commit_step", to_json(report(1)), "has no order")
    run.refused(LIAR, "commit_step", {**to_json(report(1)), "grad_square": -1.0}, "grad_square")
    assert run.ask(LIAR, "commit_step", to_json(report(1))) == {"again": True}
    assert run.ask(HONEST, "commit_step", to_json(report(1)))["checkpoint"]
    assert [outcome.step for outcome in run.outcomes] == [0, 1]


@pytest.mark.parametrize("method", [kind.wire_name for kind in REQUESTS if issubclass(kind, OrderRequest)])
def test_who_has_no_part_in_a_run_has_no_say_in_it(method, under_way):
    run, _ = under_way
    run.refused(IDLE, method, {}, f"device {IDLE} has no order")


def test_nobody_answers_for_another_or_twice(under_way):
    run, result = under_way
    run.ask(LIAR, "leave", {"reason": "it was stopped on its machine"})
    with pytest.raises(SpanTrainError, match=f"device {LIAR} was lost: it was stopped on its machine"):
        result.result(PATIENCE_S)
    run.refused(LIAR, "heartbeat", {}, "not a member of this run any more")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "endpoint: is missing"),
        ({"endpoint": HERE["endpoint"]}, "public_key: is missing"),
        ({**HERE, "endpoint": "tcp://10.6.6.6:1"}, "as somebody else"),
        ({"endpoint": 1}, "endpoint: must be text"),
    ],
)
def test_nobody_takes_another_place(facts, says, run):
    run.refused(LIAR, "introduce", facts, says)
    assert {peer.endpoint for peer in run.coordinator.peers((HONEST, LIAR))} == {HERE["endpoint"]}


@pytest.mark.parametrize("payload", [{"done": "all", "total": 1, "text": ""}, {"total": 1}, {}])
def test_progress_is_numbers_and_text(payload, under_way):
    run, _ = under_way
    run.refused(LIAR, "progress", payload, "(?s)progress of s1r0: .*(done: must be a whole number|text: is missing)")


def test_a_meeting_point_has_generation_and_stage(under_way):
    run, _ = under_way
    run.refused(LIAR, "meeting_point", {"stage": 1}, "generation: is missing")


def test_a_failure_is_of_a_known_form(run):
    outcome = {"order_id": 0, "failure": {"error": "no", "usage": "yes"}}
    run.refused(LIAR, "next_order", {"outcome": outcome}, "usage: must be true or false")


def test_a_name_that_is_held_and_heard_is_refused(run):
    with pytest.raises(RemoteRefusal, match=f"a worker has joined as {LIAR} already"):
        ControlClient.join(run.coordinator.join_address, run.coordinator.token, name=LIAR, facts={})
