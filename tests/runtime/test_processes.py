"""Real worker processes train what one process would have trained: losses, norms, held-out losses, checkpoints."""

import contextlib
import json
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import zmq

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import RunOptions, TrainRequest, resumed_run
from spantrain.app.training.run_record import DECISIONS_FILE
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.artefacts import write_profile
from spantrain.config.traces.network_traces import network_trace
from spantrain.config.traces.trace_file import read_decisions, read_trace
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.errors import ConfigError, WorkerError
from spantrain.formats.registry import WireFormat
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import loss_of, rows_read
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.runtime.gradients.optimizer import build_optimizer, clip_factor, learning_rate
from spantrain.runtime.step.work import SampledFeed
from spantrain.sim.replay import compare_all, replay, simulated_order
from testing.models.graphs import graph_of
from testing.models.zoo.trial import FOLDER
from testing.patience import PATIENCE_S
from testing.plans import interleaved, stage_and_replica

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
COMPLEX = f"{FOLDER / 'convolutions.py'}:fourier_operator"
JOB = TrainJob(
    steps=20, seed=5, learning_rate=0.02, warmup_steps=5, max_grad_norm=0.5, evaluate_every=10, adapter="off"
)
THIRDS = [Span(0, 3), Span(3, 6), Span(6, 9)]
UNEVEN = [[Span(0, 4), Span(4, 9)], THIRDS, [Span(0, 2), Span(2, 9)]]


@dataclass
class Running:
    """Workers that wait for one run after another."""

    session: Session
    logs: Path
    profile_of: object

    def train(
        self, plan: Plan, job: TrainJob, out: Path, *, meanwhile=None, **fields
    ) -> tuple[TrainOutcome, list[StepOutcome]]:
        profile = self.profile_of(plan.cluster, plan.model, plan.dtype)
        out.mkdir(parents=True, exist_ok=True)
        write_profile(profile, out / "profile.json")
        request = TrainRequest(
            plan=plan, profile=profile, profile_path=str(out / "profile.json"), job=job, out=out, **fields
        )
        return self.go(request, meanwhile)

    def go(self, request: TrainRequest, meanwhile=None) -> tuple[TrainOutcome, list[StepOutcome]]:
        stop = StopRequest()
        listener = _Steps(meanwhile, stop)
        return train(self.session, request, stop, listener), listener.steps

    def log_sizes(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in sorted(self.logs.glob("*.log"))}


class _Steps(SilentReporter):
    def __init__(self, meanwhile, stop: StopRequest) -> None:
        self.steps: list[StepOutcome] = []
        self._meanwhile = meanwhile
        self._stop = stop

    def step(self, outcome: StepOutcome, _metrics: object, total_steps: int) -> None:
        self.steps.append(outcome)
        if len(self.steps) == 1 and self._meanwhile is not None:
            self._meanwhile()
            self._stop.ask()


@pytest.fixture(scope="module")
def running(tmp_path_factory, make_plan, spec_of, law_profile):
    """Five workers on real processors, started once for all tests of this file."""
    names = make_plan(spec_of("gpt2"), [0, 1, 2, 5], [[1, 1], [1, 1], [1]], [THIRDS] * 3, "gpipe").cluster
    logs = tmp_path_factory.mktemp("logs")
    devices = tuple(device.name for device in names.devices)
    options = SessionOptions(network=False, functions=(COMPLEX,))
    with open_session(names, devices, options, logs, SilentReporter()) as session:
        yield Running(session, logs, law_profile)


@pytest.fixture(scope="module")
def alone(spec_of, reference):
    """One process's losses, gradient norms and held-out losses, each asked for once."""
    known: dict[tuple[str, TrainJob, int], tuple[list[float], list[float], dict[int, float]]] = {}

    def run(family: str, job: TrainJob, global_batch: int = 9):
        key = (family, job, global_batch)
        if key not in known:
            known[key] = single_process_run(spec_of(family), job, global_batch, reference)
        return known[key]

    return run


def single_process_run(spec, job: TrainJob, global_batch: int, reference):
    """Train without any of the pipeline: whole batches through all units, the same optimizer, sampler, clipping."""
    torch.set_num_threads(1)
    units, named = reference(spec, job.seed)
    parameters = list({id(parameter): parameter for parameter in named.values()}.values())
    optimizer = build_optimizer(job, parameters)
    feed = SampledFeed(open_dataset(spec), global_batch=global_batch, seed=job.seed)
    held_out = SampledFeed(
        open_dataset(spec, held_out=True), global_batch=global_batch, seed=job.seed, same_every_step=True
    )
    whole = Span(0, global_batch)

    def loss_on(source: SampledFeed, step: int) -> torch.Tensor:
        return loss_of(units, source.rows(step, whole, rows_read(units))) / global_batch

    losses, norms, held_out_losses = [], [], {}
    for step in range(job.steps + 1):
        if job.evaluate_every and (step % job.evaluate_every == 0 or step == job.steps):
            with torch.no_grad():
                held_out_losses[step] = float(loss_on(held_out, step))
        if step == job.steps:
            break
        loss = loss_on(feed, step)
        loss.backward()
        norm = float(sum(p.grad.abs().double().square().sum() for p in parameters if p.grad is not None) ** 0.5)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(clip_factor(norm, job.max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        norms.append(norm)
    return losses, norms, held_out_losses


def test_twenty_steps_are_those_of_one_process(running, alone, make_plan, spec_of, tmp_path):
    """Tied embedding across stages, unequal replicas, unequal spans, I and W apart, AdamW, warm-up, clipping."""
    plan = make_plan(spec_of("gpt2"), [0, 1, 3, 5], [[1], [2, 1], [1]], UNEVEN, "critical-path")
    before = running.log_sizes()
    outcome, steps = running.train(plan, JOB, tmp_path)
    losses, norms, held_out = alone("gpt2", JOB)
    assert outcome.losses == pytest.approx(losses, abs=TOLERANCE)
    assert [step.grad_norm for step in steps[:20]] == pytest.approx(norms, rel=1e-3)
    assert min(norms) < JOB.max_grad_norm < max(norms) or min(norms) > JOB.max_grad_norm
    assert {e.steps_done: e.loss for e in outcome.heldout_losses} == pytest.approx(held_out, abs=TOLERANCE)
    assert [e.steps_done for e in outcome.heldout_losses] == [0, 10, 20]
    assert outcome.losses[-1] < outcome.losses[0]
    check_figures(outcome, plan)
    check_trace(Path(outcome.trace), plan)
    check_decisions(tmp_path / DECISIONS_FILE, plan)
    for path, size in before.items():
        assert path.read_bytes()[size:] == b"", f"{path.name}: a good run writes nothing to its log"


def held_out_of(outcome: TrainOutcome) -> dict[int, float]:
    return {entry.steps_done: entry.loss for entry in outcome.heldout_losses}


def check_figures(outcome: TrainOutcome, plan: Plan) -> None:
    """Every byte that was sent was received, and every device was busy and held what it may."""
    assert outcome.steps == 20
    assert not outcome.interrupted
    assert outcome.refused_messages == {}
    for name, link in outcome.links.items():
        assert link.bytes_received == pytest.approx(link.bytes_sent, rel=0.01), name
    routes = {"s0r0 -> s1r0", "s0r0 -> s1r1", "s1r0 -> s2r0", "s1r1 -> s2r0", "s0r0 -> s2r0"}
    assert routes <= set(outcome.links)
    assert tuple(outcome.devices) == plan.devices
    for name, figures in outcome.devices.items():
        stage, replica = stage_and_replica(plan, name)
        assert 0 < figures.utilisation <= 1
        assert figures.bubble_ratio == pytest.approx(1 - figures.utilisation)
        assert 0 < figures.peak_held_samples <= plan.stages[stage].replicas[replica].in_flight_limit
        assert figures.real_compute_ratio == 1.0
    assert outcome.devices["s1r0"].sample_share == pytest.approx(2 / 3)


def check_trace(path: Path, plan: Plan) -> None:
    """The last steps are there: every device computes, sends and receives, and messages are drawn as flows."""
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len({event["pid"] for event in slices}) == len(plan.devices)
    assert min(event["ts"] for event in slices) >= 0
    assert {"s", "f"} <= {event["ph"] for event in events}


def check_decisions(path: Path, plan: Plan) -> None:
    """Fresh policies, told what the live ones were told, answer the same; and so does the simulator."""
    logs = read_decisions(path)
    assert {log.device for log in logs} == set(plan.devices)
    assert compare_all(plan, logs, replay) == ()
    assert compare_all(plan, logs, simulated_order) == ()
    for log in logs:
        assert sum(len(decision.run) for decision in log.decisions) >= 3 * 4, "three steps, at least 4 actions each"


@pytest.mark.parametrize("schedule", ["1f1b", "compact"])
def test_every_schedule_gives_the_same_losses(schedule, running, alone, make_plan, spec_of, tmp_path):
    """A replica whose share of a micro-batch is nothing takes part all the same."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 4, 5], [[3], [5, 1], [1]], [THIRDS] * 3, schedule)
    job = replace(JOB, steps=8, evaluate_every=0)
    outcome, _ = running.train(plan, job, tmp_path, checkpoints=False)
    assert outcome.losses == pytest.approx(alone("gpt2", JOB)[0][:8], abs=TOLERANCE)
    assert outcome.heldout_losses == ()
    assert outcome.checkpoint == ""
    assert not (tmp_path / "checkpoint").exists()


def test_devices_with_several_stages(running, alone, make_plan, spec_of, tmp_path):
    """Four stages on two groups of replicas, there and back: tied embeddings in one place, sums over real sockets."""
    edges = [0, 1, 2, 4, 5]
    plan = interleaved(
        make_plan(spec_of("gpt2"), edges, [[1], [2, 1], [1, 1], [1]], [THIRDS] * 4, "critical-path"),
        there_and_back=True,
    )
    before = running.log_sizes()
    outcome, steps = running.train(plan, JOB, tmp_path)
    losses, norms, held_out = alone("gpt2", JOB)
    assert outcome.losses == pytest.approx(losses, abs=TOLERANCE)
    assert [step.grad_norm for step in steps[:20]] == pytest.approx(norms, rel=1e-3)
    assert held_out_of(outcome) == pytest.approx(held_out, abs=TOLERANCE)
    assert {name: figures.stages for name, figures in outcome.devices.items()} == {
        "s0r0": (0, 3),
        "s1r0": (1, 2),
        "s1r1": (1, 2),
    }
    check_decisions(tmp_path / DECISIONS_FILE, plan)
    for path, size in before.items():
        assert path.read_bytes()[size:] == b"", f"{path.name}: a good run writes nothing to its log"


def test_resumed_run_is_the_unbroken_run(running, make_plan, spec_of, tmp_path):
    plan = make_plan(spec_of("gpt2"), [0, 1, 3, 5], [[1], [2, 1], [1]], [THIRDS] * 3, "1f1b")
    job = replace(JOB, steps=9, evaluate_every=0, lr_schedule="cosine", decay_steps=12, checkpoint_every=3)
    unbroken, _ = running.train(plan, job, tmp_path / "unbroken")
    running.train(plan, replace(job, steps=4), tmp_path / "broken")
    assert {path.name for path in (tmp_path / "broken/checkpoint").iterdir()} == {"step-3", "step-4", "latest"}
    request = resumed_run(tmp_path / "broken", 9, tmp_path / "rest", functions=())
    rest, steps = running.go(request)
    assert [step.step for step in steps] == [4, 5, 6, 7, 8]
    # A static order of work adds in the same order: the same bits.
    assert rest.losses == unbroken.losses
    assert rest.steps == 9
    assert (tmp_path / "rest/checkpoint/latest").read_text().strip() == "step-9"


def test_strangers_are_refused_and_counted(running, alone, make_plan, spec_of, tmp_path):
    """Garbage and an unknown key on the ports of the mailboxes, in the middle of a run, change only a count."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [THIRDS] * 2, "critical-path")

    def disturb() -> None:
        for peer in running.session.coordinator.peers(plan.devices):
            send_garbage(peer.endpoint)
            knock_with_a_foreign_key(peer.endpoint, peer.public_key, running.logs / f"{peer.name}.log")

    outcome, _ = running.train(plan, replace(JOB, steps=10**6, evaluate_every=0), tmp_path, meanwhile=disturb)
    assert outcome.interrupted
    assert outcome.losses[:20] == pytest.approx(alone("gpt2", JOB)[0][: len(outcome.losses)], abs=TOLERANCE)
    assert outcome.refused_messages.get("unknown peer", 0) >= len(plan.devices)


def send_garbage(endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(range(256)))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass


def knock_with_a_foreign_key(endpoint: str, server_key: str, log: Path) -> None:
    """Dial until the worker's log tells of it: the mailbox gives strangers no answer to wait for."""
    deadline_s = time.monotonic() + PATIENCE_S
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = server_key.encode()
        stranger.connect(endpoint)
        while "unknown peer" not in log.read_text():
            assert time.monotonic() < deadline_s, "the mailbox did not say that it refused"
            stranger.poll(10)


def test_image_model_with_sgd(running, alone, make_plan, spec_of, tmp_path):
    job = TrainJob(
        steps=6, seed=2, optimizer="sgd", learning_rate=0.05, warmup_steps=2, lr_schedule="cosine", decay_steps=10,
        max_grad_norm=None, evaluate_every=4,
    )  # fmt: skip
    spans = [Span(0, 3), Span(3, 6)]
    plan = make_plan(spec_of("resnet"), [0, 2, 5], [[1, 1], [1]], [spans, [Span(0, 6)]], "critical-path")
    outcome, _ = running.train(plan, job, tmp_path)
    losses, _, held_out = alone("resnet", job, 6)
    assert outcome.losses == pytest.approx(losses, abs=TOLERANCE)
    assert {e.steps_done: e.loss for e in outcome.heldout_losses} == pytest.approx(held_out, abs=TOLERANCE)


def test_weights_that_are_complex(running, reference, make_plan, tmp_path):
    spec = resolve_model(COMPLEX)
    job = replace(JOB, steps=4, evaluate_every=0)
    spans = [Span(0, 3), Span(3, 6)]
    plan = make_plan(spec, [0, 2, 4, 6], [[1, 1], [1], [1]], [spans] * 3, "critical-path")
    losses, norms, _ = single_process_run(spec, job, 6, reference)
    outcome, steps = running.train(plan, job, tmp_path)
    assert outcome.losses == pytest.approx(losses, abs=TOLERANCE)
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-3)


def test_bfloat16_learns(running, alone, make_plan, spec_of, tmp_path):
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [THIRDS] * 2, "critical-path")
    job = replace(JOB, evaluate_every=0)
    outcome, _ = running.train(replace(plan, dtype="bfloat16"), job, tmp_path)
    exact = alone("gpt2", JOB)[0]
    assert sum(outcome.losses[-3:]) < sum(outcome.losses[:3])
    assert outcome.losses == pytest.approx(exact, rel=0.05)
    assert outcome.losses != pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("wire_format", [WireFormat.BFLOAT16, WireFormat.INT8])
def test_a_rounded_cut_learns_as_the_exact_one_does(wire_format, running, alone, make_plan, spec_of, tmp_path):
    """The cut behind the first stage is rounded, held-out batches too; tied sums and the other cut stay exact."""
    plan = make_plan(spec_of("gpt2"), [0, 1, 3, 5], [[1], [2, 1], [1]], [THIRDS] * 3, "1f1b")
    first, *others = plan.stages
    rounded = replace(plan, stages=(replace(first, wire_format=wire_format), *others))
    losses, _, held_out = alone("gpt2", JOB)
    sent = []
    for number, one in enumerate((plan, rounded)):
        outcome, _ = running.train(one, replace(JOB, adapter="off"), tmp_path / str(number))
        sent.append(message_bytes(Path(outcome.trace), one))
    assert outcome.losses == pytest.approx(losses, rel=0.01)
    assert outcome.losses != pytest.approx(losses, rel=1e-7)
    assert held_out_of(outcome) == pytest.approx(held_out, rel=0.01)
    assert outcome.losses[-1] < outcome.losses[0]
    exact, fewer = sent
    cut = graph_of(plan.model).units[0]
    native = cut.forward_bytes(WireFormat.NATIVE) + cut.backward_bytes(WireFormat.NATIVE)
    assert exact[0, 1] % native == 0
    per_sample = cut.forward_bytes(wire_format) + cut.backward_bytes(wire_format)
    assert fewer == exact | {(0, 1): exact[0, 1] // native * per_sample}


def message_bytes(path: Path, plan: Plan) -> dict[tuple[int, int], int]:
    """Bytes of samples between each pair of stages over the steps of a trace, both ways together."""
    total: dict[tuple[int, int], int] = {}
    for flow in read_trace(path).flows:
        if flow.name.split("/")[2] in ("forward", "backward"):
            low, high = sorted(stage_and_replica(plan, name)[0] for name in (flow.source, flow.target))
            total[low, high] = total.get((low, high), 0) + flow.size_bytes
    return total


def test_one_device_alone(running, alone, make_plan, spec_of, tmp_path):
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1]], [THIRDS], "critical-path")
    outcome, _ = running.train(plan, replace(JOB, steps=3, evaluate_every=0), tmp_path)
    assert outcome.losses == pytest.approx(alone("gpt2", JOB)[0][:3], abs=TOLERANCE)
    assert outcome.links == {}


def test_links_that_are_not_emulated_follow_no_trace(running, make_plan, spec_of, tmp_path):
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1]], [THIRDS], "1f1b")
    with pytest.raises(ConfigError, match="not on an emulated network"):
        running.train(plan, JOB, tmp_path, options=RunOptions(network_trace=network_trace("burst")))


@pytest.mark.parametrize(
    ("cuts", "shares"), [([0, 5], [[1]]), ([0, 1, 3, 5], [[1], [2, 1], [1]])], ids=["loss", "norm"]
)
def test_divergence_is_told_once_and_the_workers_live_on(running, make_plan, spec_of, tmp_path, cuts, shares):
    plan = make_plan(spec_of("gpt2"), cuts, shares, [THIRDS] * len(shares), "critical-path")
    hopeless = TrainJob(steps=50, optimizer="sgd", learning_rate=1e30, warmup_steps=0, max_grad_norm=None)
    with pytest.raises(WorkerError, match=r"(?s)device s\dr\d failed.*diverged.*--learning-rate") as failure:
        running.train(plan, hopeless, tmp_path / "hopeless")
    assert "WorkerError" not in str(failure.value)
    outcome, _ = running.train(plan, replace(JOB, steps=2), tmp_path / "next")
    assert outcome.steps == 2
