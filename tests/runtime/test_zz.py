from dataclasses import replace
import pytest
from spantrain.core.job import TrainJob
from spantrain.core.shares import StateSharding
from testing.runtime.runs import OneProcess
from testing.runtime.sessions import train_in_threads
JOB = TrainJob(steps=6, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5)
@pytest.mark.parametrize("places",[([0,5],[[["a"]]]),([0,3,5],[[["a"]],[["b"]]]),([0,3,5],[[["a"]],[["b"],["c"]]])])
@pytest.mark.parametrize("schedule",["1f1b","critical-path","zb"])
def test_it(places,four,schedule):
    plan=four(*places, schedule=schedule); plan=replace(plan,stages=tuple(replace(s,state_sharding=StateSharding.OFFLOAD if len(s.replicas)==1 else StateSharding.NONE) for s in plan.stages))
    ran=train_in_threads(plan,JOB)
    want=OneProcess(plan.model,JOB,plan.global_batch).train(0,JOB.steps)
    assert ran.losses==pytest.approx(want,rel=1e-5)
    print({n:r.peak_bytes for n,r in ran.results.items()})
