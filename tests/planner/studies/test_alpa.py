"""Alpa's submeshes may divide tensors, inside hosts and in one way for all."""

from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import JobSpec, PlanRequest
from spantrain_studies.planners.alpa import alpa
from testing.hosts import cluster_of_hosts, divisible


def degrees_of(profile, *, batch):
    job = JobSpec(global_batch=batch)
    evaluator = Evaluator(profile, job)
    proposals = alpa(PlanRequest(profile=profile, job=job, evaluate=evaluator))
    assert all(evaluator(proposal.plan).fits for proposal in proposals)
    devices = profile.cluster.device_by_name
    replicas = [replica for proposal in proposals for stage in proposal.plan.stages for replica in stage.replicas]
    assert all(len({devices[name].host for name in replica.devices}) == 1 for replica in replicas)
    return {len(replica.devices) for replica in replicas}


def test_tensors_are_divided_where_memory_asks_for_it(make_graph, make_profile):
    graph = divisible(make_graph(1, hidden=1024))
    small = cluster_of_hosts({"s": [("k", 2)] * 2}, speed={"k": 0.01}, memory_bytes=450 * 2**20)
    assert max(degrees_of(make_profile(small, graph), batch=4)) == 2


def test_hosts_that_do_not_divide_evenly_have_no_groups(make_graph, make_profile):
    graph = divisible(make_graph(4))
    uneven = cluster_of_hosts({"s": [("k", 3), ("k", 1)]}, speed={"k": 0.01})
    assert degrees_of(make_profile(uneven, graph), batch=8) == {1}
