"""The barrier at the end of a step."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from patience import PATIENCE_S
from spantrain.core.job import TrainJob
from spantrain.errors import Interrupted
from spantrain.runtime.barrier import StepBarrier, StepOutcome
from spantrain.runtime.orders import StepReport


def barrier_of(job: TrainJob, outcomes: list[StepOutcome], *, stop: bool = False) -> StepBarrier:
    return StepBarrier(
        devices=frozenset({"a", "b"}),
        job=job,
        global_batch=4,
        stop_requested=lambda: stop,
        on_step=outcomes.append,
        can_checkpoint=True,
    )


def report(step: int, loss_sum: float | None, square: float) -> StepReport:
    return StepReport(generation=0, step=step, loss_sum=loss_sum, grad_square=square, busy_s=0.1, peak_held_samples=2)


def both(barrier: StepBarrier, step: int):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(barrier.report, "a", report(step, None, 9.0))
        second = pool.submit(barrier.report, "b", report(step, 8.0, 16.0))
        return first.result(PATIENCE_S), second.result(PATIENCE_S)


def test_all_get_the_same_verdict_with_the_global_loss_and_norm():
    outcomes: list[StepOutcome] = []
    a, b = both(barrier_of(TrainJob(steps=5), outcomes), 0)
    assert a == b
    assert (a.grad_norm, a.stop, a.checkpoint) == (5.0, False, False)
    assert outcomes[0].loss == 2.0
    assert outcomes[0].busy_s == {"a": 0.1, "b": 0.1}


def test_checkpoints_come_regularly_and_at_the_end():
    barrier = barrier_of(TrainJob(steps=4, checkpoint_every=2), [])
    verdicts = [both(barrier, step)[0] for step in range(4)]
    assert [v.checkpoint for v in verdicts] == [False, True, False, True]
    assert [v.stop for v in verdicts] == [False, False, False, True]


def test_a_wish_to_stop_ends_with_a_checkpoint():
    verdict, _ = both(barrier_of(TrainJob(steps=100), [], stop=True), 0)
    assert verdict.stop
    assert verdict.checkpoint


def test_an_abort_lets_everybody_go():
    barrier = barrier_of(TrainJob(steps=2), [])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(barrier.report, "a", report(0, None, 1.0))
        barrier.abort("device b was lost")
        with pytest.raises(Interrupted, match="device b was lost"):
            waiting.result(PATIENCE_S)


def test_who_asks_again_gets_the_same_verdict_and_the_next_step_waits_for_nobody_twice():
    """Its answer was lost with the network: the report came, so it does not count anew."""
    outcomes: list[StepOutcome] = []
    barrier = barrier_of(TrainJob(steps=5), outcomes)
    first, _ = both(barrier, 0)
    assert barrier.report("a", report(0, None, 9.0)) == first
    both(barrier, 1)
    assert [outcome.step for outcome in outcomes] == [0, 1]


def test_the_first_step_takes_its_time_from_its_begin():
    outcomes: list[StepOutcome] = []
    barrier = barrier_of(TrainJob(steps=5), outcomes)
    barrier.begin(time.monotonic() + 100.0)
    both(barrier, 0)
    assert outcomes[0].duration_s < -90.0


@pytest.mark.parametrize(("digest", "differs"), [("f" * 64, False), ("0" * 64, True)])
def test_data_that_differs_between_machines_is_said_to_all(digest: str, differs: bool):
    barrier = barrier_of(TrainJob(steps=2), [])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(barrier.report, "a", replace(report(0, None, 1.0), data_digest="f" * 64))
        second = pool.submit(barrier.report, "b", replace(report(0, 8.0, 1.0), data_digest=digest))
        said = {first.result(PATIENCE_S).data_differs, second.result(PATIENCE_S).data_differs}
    assert said == ({"a (SHA-256 ffffffffffff) and b (SHA-256 000000000000)"} if differs else {""})
