"""State that goes ahead of a change of plan is what its givers have when the change comes, to the bit."""

from dataclasses import replace

import pytest
import torch

from spantrain.core.job import TrainJob
from spantrain.core.shares import TensorPart
from spantrain.errors import ProtocolError
from spantrain.runtime.checkpoint.holding import Holding
from spantrain.runtime.control.requests import AheadCopy
from spantrain.runtime.words import packed_words
from spantrain.runtime.worker.keeping import ahead, copying
from spantrain.runtime.worker.keeping.ahead import AheadTaker
from spantrain.runtime.worker.keeping.copying import CopyLink
from spantrain.runtime.worker.keeping.stage_copy import StageCopy
from testing.runtime.places import BATCH
from testing.runtime.runs import OneProcess
from testing.runtime.sessions import RanAhead, train_ahead

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=12, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5, adapter="off")
JOBS = {
    "clipped AdamW": JOB,
    "momentum": replace(JOB, optimizer="sgd", max_grad_norm=None),
    "statistics": replace(JOB, optimizer="sgd", batch_norm="micro-batch"),
}
NEWCOMER = [AheadCopy("a", "d", (1,)), AheadCopy("c", "d", (3, 4))]
AMONG = [AheadCopy("c", "a", (2,)), AheadCopy("b", "c", (0, 1))]


def check(ran: RanAhead, copies: list[AheadCopy]) -> None:
    """All that was to be taken is there, as the giver has it now."""
    left = ran.left()
    for copy in copies:
        giver, (taken,) = left[copy.giver], [one for one in left[copy.taker].kept if one.ward == copy.giver]
        assert taken.units == copy.units
        for name, own in taken.holding.tensors.items():
            assert torch.equal(own, giver.part.holding.tensors[name]), name
        for name, own in taken.holding.parameters.items():
            state = giver.part.optimizer.state[giver.part.holding.parameters[name]]
            for key, value in taken.optimizer.state[own].items():
                assert torch.equal(value, state[key]) if isinstance(value, torch.Tensor) else value == state[key]


@pytest.fixture
def stages(four):
    def stages(family="gpt2"):
        return four([0, 2, 5], [[["a"], ["b"]], [["c"]]], family=family)

    return stages


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("family", ["gpt2", "resnet"])
@pytest.mark.parametrize("copies", [NEWCOMER, AMONG, NEWCOMER + AMONG], ids=["newcomer", "among", "both"])
def test_what_is_taken_ahead_is_what_its_giver_has(copies, job, family, stages):
    plan = stages(family)
    ran = train_ahead(plan, JOBS[job], copies, begin=2)
    assert ran.paused
    check(ran, copies)
    if job != "statistics":
        wanted = OneProcess(plan.model, JOBS[job], BATCH).train(0, len(ran.losses))
        assert ran.losses == pytest.approx(wanted, rel=1e-5)


def slow(monkeypatch, pieces_a_step: int) -> None:
    """Have pieces small, and few of them go in each step."""
    monkeypatch.setattr(copying, "PIECE_BYTES", 2048)
    give = CopyLink.give

    def give_slowly(link: CopyLink, number: int, piece: torch.Tensor) -> bool:
        step = max(link.carrier._steps, default=10**6)
        return number < pieces_a_step * (step - 2) and give(link, number, piece)

    monkeypatch.setattr(CopyLink, "give", give_slowly)


def test_a_copy_may_take_some_steps_and_catches_up(stages, monkeypatch):
    slow(monkeypatch, 20)
    ran = train_ahead(stages(), replace(JOB, steps=40), NEWCOMER, begin=2)
    assert ran.paused
    assert 5 < len(ran.losses) < 12
    check(ran, NEWCOMER)


def test_a_way_that_is_too_slow_has_all_pause_and_the_rest_goes_then(stages, monkeypatch):
    monkeypatch.setattr(ahead, "_LEAST_BYTES", 0)
    slow(monkeypatch, 1)
    ran = train_ahead(stages(), replace(JOB, steps=40), NEWCOMER, begin=2)
    assert ran.paused
    assert len(ran.losses) < 20
    check(ran, NEWCOMER)


def test_gradients_that_overflow_change_nothing(stages):
    plan = replace(stages(), dtype="float16")
    ran = train_ahead(plan, replace(JOB, loss_scale=2.0**40), NEWCOMER, begin=0)
    check(ran, NEWCOMER)


class Wire:
    """In the place of a link: pieces that have come."""

    ward = "a"

    def __init__(self, *pieces: torch.Tensor) -> None:
        self.pieces = list(pieces)

    def want(self, names):
        """Nothing is lacking that is to be copied."""

    def take(self, number):
        return self.pieces.pop(0) if self.pieces else None


def words(**changes: object) -> torch.Tensor:
    return packed_words({"step": 3, "grad_norm": 1.0, "size_bytes": 50, "ends": False} | changes)


def some(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


HOSTILE = {
    "no words": ([some(8)], "cannot be unpacked"),
    "other words": ([packed_words({"step": "3"})], "a says which step comes ahead: "),
    "a norm that is none": ([words(grad_norm="1")], "a says which step comes ahead: "),
    "another step": ([words(step=7)], "of step 7 ahead"),
    "less than nothing": ([words(size_bytes=-1)], "-1 bytes of step 3"),
    "more than there can be": ([words(size_bytes=10**12)], "awaited are 50 at most"),
    "more than was said": ([words(), some(51)], "sent 51 bytes of a step of 50"),
    "other gradients": ([words(size_bytes=49), some(49)], "its units have other gradients"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_taker_takes_nothing_that_is_no_step_of_its_units(what):
    pieces, message = HOSTILE[what]
    layer = torch.nn.Linear(3, 3)
    named = dict(layer.named_parameters())
    parts = {name: TensorPart(full_shape=tuple(own.shape)) for name, own in named.items()}
    holding = Holding(parameters=named, parts=parts, writes=frozenset(named))
    copy = StageCopy(ward="a", units=(0,), holding=holding, optimizer=torch.optim.SGD(layer.parameters()))
    taker = AheadTaker(Wire(*pieces), copy, (copy,), 3)
    with pytest.raises(ProtocolError, match=message):
        taker.go_on(JOB)
