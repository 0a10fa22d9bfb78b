"""Keepers follow a stage to the bit, whatever runs, in whatever order, and whatever plan takes over."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from spantrain.core.checkpoint import StoredTensor
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.shares import TensorPart
from spantrain.errors import ProtocolError
from spantrain.recovery.protection import protected
from spantrain.runtime.checkpoint.holding import Holding
from spantrain.runtime.redistribution.exchange import HeldTensors
from spantrain.runtime.words import packed_words
from spantrain.runtime.worker.keeping import copying
from spantrain.runtime.worker.keeping.copying import CopyLink, CopyReceiver, CopySender
from testing.runtime.places import BATCH, HALVES, random_places
from testing.runtime.runs import OneProcess
from testing.runtime.sessions import Ran, train_in_threads

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=9, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5, adapter="off")
JOBS = {
    "clipped AdamW": JOB,
    "momentum": replace(JOB, optimizer="sgd", max_grad_norm=None),
    "statistics": replace(JOB, optimizer="sgd", batch_norm="micro-batch"),
}


def kept_by_others(plan: Plan, losses: int = 1) -> Plan:
    return protected(plan, losses, [0] * len(plan.crews), dict.fromkeys(plan.devices, 0))


def copies(ran: Ran, plan: Plan) -> int:
    """The number of copies, each of which is the stage's first device's to the bit."""
    count = 0
    for session in ran.sessions.values():
        for kept in session._keeping.whole:
            ward = ran.sessions[kept.ward]._part
            assert kept.units == plan.crew_of(kept.ward).units
            for name, own in ward.holding.tensors.items():
                assert torch.equal(own, kept.holding.tensors[name]), name
            for name, own in ward.holding.parameters.items():
                state, copy = ward.optimizer.state[own], kept.optimizer.state[kept.holding.parameters[name]]
                assert state.keys() == copy.keys()
                for key, value in state.items():
                    assert torch.equal(value, copy[key]) if isinstance(value, torch.Tensor) else value == copy[key]
            count += 1
    assert count == sum(len(crew.first.keepers) for crew in plan.crews)
    return count


@pytest.mark.parametrize(
    ("family", "job"), [("gpt2", "clipped AdamW"), ("resnet", "momentum"), ("resnet", "statistics")]
)
def test_a_copy_is_the_stage_to_the_bit(job, family, four):
    plan = kept_by_others(four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]], family=family), 2)
    ran = train_in_threads(plan, JOBS[job])
    assert copies(ran, plan) == 5
    if job != "statistics":
        assert ran.losses == pytest.approx(OneProcess(plan.model, JOBS[job], BATCH).train(0, JOB.steps), rel=1e-5)


@pytest.mark.parametrize(
    ("job", "places"),
    [("clipped AdamW", [[["a"]], [["b"]], [["c"]], [["a"]]]), ("momentum", [[["a"]], [["b"]], [["a"]], [["b"]]])],
)
def test_a_copy_is_of_all_stages_of_a_device(job, places, four):
    plan = kept_by_others(four([0, 1, 2, 3, 5], places, schedule="critical-path"))
    ran = train_in_threads(plan, JOBS[job])
    assert copies(ran, plan) == len(plan.crews)
    assert ran.losses == pytest.approx(OneProcess(plan.model, JOBS[job], BATCH).train(0, JOB.steps), rel=1e-5)
    edges = [*range(len(plan.crews)), 5]
    plain = kept_by_others(four(edges, [[[name]] for name in plan.devices], schedule="critical-path"))
    there, back = train_in_threads(plain, JOBS[job], {3: plan}), train_in_threads(plan, JOBS[job], {3: plain})
    assert copies(there, plan) == len(plan.crews)
    assert copies(back, plain) == len(plan.crews)
    assert there.losses == pytest.approx(back.losses, rel=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_copies_go_with_any_change_of_plan(seed, four):
    random = Random(seed)
    family = random.choice(["gpt2", "resnet"])
    first = kept_by_others(four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]], family=family))
    plans = [kept_by_others(four(*random_places(random), family=family), random.randint(0, 3)) for _ in range(4)]
    ran = train_in_threads(first, JOB, dict(enumerate(plans, start=1)))
    copies(ran, plans[-1])
    assert ran.losses == pytest.approx(OneProcess(first.model, JOB, BATCH).train(0, JOB.steps), rel=1e-4)


def test_a_change_that_moves_nothing_leaves_copies_where_they_are(four):
    groups = [[["a"]], [["b"], ["c"]], [["d"]]]
    first = kept_by_others(four([0, 2, 3, 5], groups))
    second = kept_by_others(four([0, 2, 3, 5], groups, HALVES, "critical-path"))
    ran = train_in_threads(first, JOB, {2: second})
    assert copies(ran, second) == 2
    assert [outcome.switch.received_bytes for outcome in ran.outcomes if outcome.switch] == [0]


def test_gradients_that_overflow_change_no_copy(four):
    plan = replace(kept_by_others(four([0, 2, 5], [[["a"], ["b"]], [["c"], ["d"]]]), 2), dtype="float16")
    ran = train_in_threads(plan, replace(JOB, loss_scale=2.0**40))
    assert ran.outcomes[0].skipped
    assert copies(ran, plan) == 2


def changed_places(four):
    """A plan of three stages with keepers, and one with other cuts that takes its place."""
    first = kept_by_others(four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]]))
    return first, kept_by_others(four([0, 3, 4, 5], [[["b"]], [["d"]], [["a"], ["c"]]]))


def let_through(monkeypatch, may: Callable[[CopyLink, int], bool]) -> None:
    """Have pieces of copies small, and go only where they may."""
    monkeypatch.setattr(copying, "PIECE_BYTES", 256)
    give = CopyLink.give
    monkeypatch.setattr(CopyLink, "give", lambda link, number, piece: may(link, number) and give(link, number, piece))


@pytest.mark.parametrize("job", ["clipped AdamW", "momentum"])
def test_a_copy_may_take_some_steps_and_is_a_keepers_when_it_is_whole(job, four, monkeypatch):
    first, second = changed_places(four)
    let_through(monkeypatch, lambda link, number: number < 10 * (max(link.carrier._steps, default=99) - 2))
    ran = train_in_threads(first, replace(JOBS[job], steps=12), {2: second})
    whole = [outcome.keepers for outcome in ran.outcomes]
    both = tuple(stage.keepers for stage in second.stages)
    assert whole[:3] == [tuple(stage.keepers for stage in first.stages)] * 3
    numbers = [sum(map(len, keepers)) for keepers in whole[3:]]
    assert numbers == sorted(numbers)
    assert numbers[0] < 2
    assert whole[-1] == both
    assert copies(ran, second) == 2
    assert ran.losses == pytest.approx(OneProcess(first.model, JOBS[job], BATCH).train(0, 12), rel=1e-5)


def test_steps_wait_for_a_copy_that_does_not_get_on(four, monkeypatch):
    first, second = changed_places(four)
    let_through(monkeypatch, lambda link, _number: not link.carrier._steps)
    ran = train_in_threads(first, JOB, {2: second})
    whole = [outcome.keepers == tuple(stage.keepers for stage in second.stages) for outcome in ran.outcomes[3:]]
    assert whole == [False] * 3 + [True] * 3
    assert copies(ran, second) == 2


class Wire:
    """In the place of a link: what the one side has sent is there for the other."""

    ward, keeper = "a", "b"

    def __init__(self):
        self.pieces, self.names = {}, None

    def want(self, names):
        self.names = sorted(names)

    def wanted(self):
        return self.names

    def give(self, number, piece):
        self.pieces[number] = piece
        return True

    def take(self, number):
        return self.pieces.pop(number, None)


class Part:
    """A stage of a linear layer and its optimizer."""

    def __init__(self, size=3):
        self.layer = torch.nn.Linear(size, size)
        names = dict(self.layer.named_parameters())
        parts = {name: TensorPart(full_shape=tuple(own.shape)) for name, own in names.items()}
        self.holding = Holding(parameters=names, parts=parts, writes=frozenset(names))
        self.optimizer = torch.optim.AdamW(self.layer.parameters())

    def train(self):
        self.layer(torch.ones(self.layer.in_features)).sum().backward()
        self.optimizer.step()
        return self


def test_a_copy_is_of_before_the_update_that_it_was_begun_before():
    ward, copy, wire = Part().train(), Part(), Wire()
    sender = CopySender(wire, ward.holding, ward.optimizer, lambda made: made())
    receiver = CopyReceiver(wire, copy.holding, copy.optimizer, ())
    before = {name: own.detach().clone() for name, own in ward.layer.named_parameters()}
    sender.before_update()
    ward.train()
    sender.go_on()
    assert receiver.go_on()
    for name, own in copy.layer.named_parameters():
        assert torch.equal(own, before[name])
        assert copy.optimizer.state[own]["step"] == 1


def test_what_is_here_of_the_same_step_is_not_sent():
    ward, wire = Part().train(), Wire()
    sender = CopySender(wire, ward.holding, ward.optimizer, lambda made: made())
    copy = Part()
    assert CopyReceiver(wire, copy.holding, copy.optimizer, (ward,)).is_whole
    sender.go_on()
    assert (sender.is_done, wire.pieces, wire.names) == (True, {}, [])
    assert torch.equal(copy.layer.weight, ward.layer.weight)


def described(**tensors: tuple[tuple[int, ...], str]) -> torch.Tensor:
    stored = {
        name.replace("__", "/"): StoredTensor(part=TensorPart(full_shape=shape), dtype=dtype)
        for name, (shape, dtype) in tensors.items()
    }
    return packed_words(HeldTensors(device="a", tensors=stored))


WEIGHT = {"parameter__weight": ((3, 3), "float32"), "parameter__bias": ((3,), "float32")}
HOSTILE = {
    "no words": ([torch.zeros(8, dtype=torch.uint8)], "cannot be unpacked"),
    "nothing": ([packed_words([])], "a says what it holds"),
    "less than was asked for": ([described(parameter__weight=((3, 3), "float32"))], "it lacks bias"),
    "other shapes": ([described(**{**WEIGHT, "parameter__bias": ((4,), "float32")})], "has shape"),
    "other types": ([described(**{**WEIGHT, "parameter__bias": ((3,), "float64")})], "has type"),
    "more than was asked for": ([described(**WEIGHT, optimizer__x__other=((3,), "float32"))], "other tensors"),
    "state that is large": ([described(**WEIGHT, optimizer__x__bias=((10**12,), "float32"))], "in shape"),
    "state of no type": ([described(**WEIGHT, optimizer__x__bias=((3,), "manual_seed"))], "no type of numbers"),
    "too many bytes": ([described(**WEIGHT), torch.zeros(49, dtype=torch.uint8)], "1 bytes more"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_keeper_takes_nothing_that_is_not_the_stage(what):
    pieces, message = HOSTILE[what]
    copy, wire = Part(), Wire()
    receiver = CopyReceiver(wire, copy.holding, copy.optimizer, ())
    wire.pieces = dict(enumerate(pieces))
    with pytest.raises(ProtocolError, match=message):
        receiver.go_on()


def test_a_keeper_gets_nothing_that_is_not_there():
    ward, wire = Part(), Wire()
    wire.want(["weight", "secret"])
    with pytest.raises(ProtocolError, match="b: lacks secret"):
        CopySender(wire, ward.holding, ward.optimizer, lambda made: made()).go_on()
