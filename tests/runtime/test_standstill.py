"""Nothing passes between two sites of a run while all are heard: it is said, and the run goes on on one side."""

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.runtime.worker.watch import unreached
from spantrain.testbed.testbed import why_unavailable
from spantrain.transport.connection.peers import PeerAddress
from testing.runtime.places import in_sites
from testing.runtime.runs import OneProcess

THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]


def test_who_listens_or_refuses_is_reached_and_who_is_silent_or_nowhere_is_not():
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        closed = full.getsockname()[1]
        peers = [
            PeerAddress(name="there", endpoint=f"tcp://127.0.0.1:{there.getsockname()[1]}", public_key=""),
            PeerAddress(name="refuses", endpoint=f"tcp://127.0.0.1:{closed}", public_key=""),
            PeerAddress(name="dials itself", endpoint="", public_key=""),
        ]
        assert unreached(peers, 0.5) == ()
        nowhere = PeerAddress(name="nowhere", endpoint="tcp://255.255.255.255:9", public_key="")  # an error at once
        assert unreached([*peers, nowhere], 0.3) == ("nowhere",)
        with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
            place = deaf.getsockname()
            # A queue that is full answers no more, as a network that is cut.
            waiting = [socket.socket() for _ in range(4)]
            for line in waiting:
                line.setblocking(False)
                line.connect_ex(place)
            silent = PeerAddress(name="silent", endpoint=f"tcp://127.0.0.1:{place[1]}", public_key="")
            assert unreached([*peers, silent], 0.3) == ("silent",)
            for line in waiting:
                line.close()


@dataclass
class Cutter(SilentReporter):
    """Cuts a site off behind a step."""

    site: str
    session: Session | None = None
    notes: list[str] = field(default_factory=list)
    steps: int = 0

    def step(self, outcome, _metrics, total_steps):
        self.steps += 1
        if self.steps == 3:
            self.session.testbed.cut(self.site)

    def note(self, text):
        self.notes.append(text)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
def test_a_site_that_is_cut_off_is_told_of_and_given_up(make_plan, spec_of, law_profile, tmp_path):
    if (reason := why_unavailable()) is not None:
        pytest.skip(reason)
    torch.set_num_threads(1)
    plan = make_plan(spec_of("gpt2"), [0, 2, 3, 5], [[1], [1], [1]], [THIRDS] * 3, "1f1b")
    plan = in_sites(plan, {"s0r0": "near", "s1r0": "near", "s2r0": "far"})
    job = TrainJob(steps=6, seed=5, learning_rate=0.001, adapter="off")
    request = TrainRequest(
        plan=plan, profile=law_profile(plan.cluster, plan.model), profile_path="", job=job, out=Path(tmp_path),
        options=RunOptions(protect=1),
    )  # fmt: skip
    told = Cutter("far")
    options = SessionOptions(heartbeat_timeout_s=4.0)
    with open_session(plan.cluster, plan.devices, options, tmp_path / "logs", told) as session:
        told.session = session
        outcome = train(session, request, StopRequest(), told)
    assert "s2r0" not in outcome.devices
    (said,) = [note for note in told.notes if "wait for each other" in note]
    assert "s2r0 and s0r0, s1r0 wait for each other: nothing passes between them" in said
    # Of whom nothing came for so long at that moment: messages to the two are not of one moment.
    reason = outcome.plan_changes[0].reason
    found = re.match(r"s2r0 lost \(nothing passes between it and (?:s0r0, s1r0|s0r0|s1r0) for ([\d.]+) s", reason)
    assert found, reason
    assert float(found[1]) >= 4.0
    assert outcome.losses == pytest.approx(OneProcess(plan.model, job, 6).train(0, 6), abs=1e-4)
