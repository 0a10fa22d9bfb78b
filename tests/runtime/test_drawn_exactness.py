"""Dropout under any plan, schedule and recomputation: losses of one device with the same draws."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.job import TrainJob
from spantrain.core.span import equal_spans
from spantrain.models.build import unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.schedule.registry import schedule_names
from testing.models.zoo.trial import FOLDER
from testing.runtime.runs import OneProcess
from testing.runtime.sessions import train_in_threads

BATCH = 6
JOB = TrainJob(steps=2, seed=5, optimizer="sgd", learning_rate=0.05, warmup_steps=0)


@pytest.mark.parametrize("name", ["dropout", "torch_attention"])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan_schedule_and_recomputation(name, data, make_plan):
    spec = resolve_model(f"{FOLDER / 'plain'}.py:{name}")
    count = unit_count(spec)
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=2), "cuts")), count]
    shares = [data.draw(st.sampled_from([[1], [1, 1], [2, 1]]), "shares") for _ in edges[1:]]
    spans = list(equal_spans(BATCH, data.draw(st.integers(2, 4), "size")))
    plan = make_plan(spec, edges, shares, [spans] * len(shares), data.draw(st.sampled_from(schedule_names())))
    again = [data.draw(st.sets(st.integers(lo, hi - 1), max_size=2), "again") for lo, hi in pairwise(edges)]
    stages = [replace(stage, recompute=tuple(sorted(own))) for stage, own in zip(plan.stages, again, strict=True)]
    wanted = OneProcess(spec, JOB, BATCH).train(0, JOB.steps)
    assert train_in_threads(replace(plan, stages=tuple(stages)), JOB).losses == pytest.approx(wanted, rel=1e-5)
