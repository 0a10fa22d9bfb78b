"""As whom a training run takes part in an outer optimizer, and which plans may."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from made_up_sites import sites_cluster, two_stages
from spantrain.app.outer_pipeline import check_outer, outer_cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError, UsageError

VARIABLES = {
    "SPANTRAIN_OUTER_MASTER": "m:7000",
    "SPANTRAIN_OUTER_TOKEN": "st1secret",
    "SPANTRAIN_OUTER_CLUSTER": "lab",
    "SPANTRAIN_OUTER_INNER_STEPS": "16",
    "SPANTRAIN_OUTER_ENCRYPTED": "0",
}
JOB = TrainJob(steps=4, adapter="off")


def test_a_run_is_a_cluster_if_it_was_started_so():
    found = outer_cluster(VARIABLES)
    assert found is not None
    assert (found.master, found.cluster, found.inner_steps, found.encrypted) == ("m:7000", "lab", 16, False)
    assert "secret" not in repr(found)
    assert outer_cluster({}) is None


def test_half_of_the_variables_are_refused():
    with pytest.raises(UsageError, match="SPANTRAIN_OUTER_TOKEN is not set"):
        outer_cluster({"SPANTRAIN_OUTER_MASTER": "m:7000"})


def divided(plan: Plan) -> Plan:
    """The same on one stage of a group of two devices."""
    head, tail = plan.stages
    devices = (*head.devices, *tail.devices)
    group = replace(head.replicas[0], devices=devices, tp_shares=(1.0, 1.0))
    return replace(plan, stages=(replace(head, end_unit=tail.end_unit, replicas=(group,)),))


def test_what_cannot_be_a_cluster_is_told_all_at_once():
    cluster = sites_cluster()
    names = [device.name for device in cluster.devices]
    plan = two_stages(cluster, names[0], names[1])
    check_outer(plan, JOB, SimpleNamespace(testbed=None))
    with pytest.raises(
        ConfigError, match=rf"{names[0]}\+{names[1]} divide tensors .*; steps overlap .*; .*--no-network"
    ):
        check_outer(divided(plan), replace(JOB, staleness=1), SimpleNamespace(testbed=object()))
