"""Plans whose replicas are tensor-parallel groups."""

from dataclasses import replace

from hypothesis import strategies as st

from spantrain.core.plan import Plan

Groups = list[list[list[int]]]
"""By stage and replica: tensor shares of its devices."""


def divided(plan: Plan, groups: Groups, slices: frozenset[int] = frozenset()) -> Plan:
    """The plan with replicas of several devices, some stages with slices of the sequence where they have groups."""
    stages, names = [], []
    for index, stage in enumerate(plan.stages):
        replicas = []
        for number, (replica, shares) in enumerate(zip(stage.replicas, groups[index], strict=True)):
            devices = tuple(f"s{index}r{number}t{rank}" for rank in range(len(shares)))
            names += devices
            replicas.append(replace(replica, devices=devices, tp_shares=tuple(map(float, shares))))
        grouped = any(len(replica.devices) > 1 for replica in replicas)
        stages.append(replace(stage, replicas=tuple(replicas), sequence_parallel=grouped and index in slices))
    one = plan.cluster.devices[0]
    host = replace(plan.cluster.hosts[0], devices=tuple(names))
    devices = tuple(replace(one, name=name) for name in names)
    return replace(plan, cluster=replace(plan.cluster, hosts=(host,), devices=devices), stages=tuple(stages))


@st.composite
def random_groups(draw: st.DrawFn, plan: Plan) -> Groups:
    shares = st.lists(st.integers(1, 4), min_size=1, max_size=3)
    return [[draw(shares) for _ in stage.replicas] for stage in plan.stages]
