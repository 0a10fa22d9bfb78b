"""As whom a training run takes part in an outer optimizer, and which runs may."""

from types import SimpleNamespace

import pytest

from spantrain.app.outer.join import check_outer, outer_cluster
from spantrain.errors import ConfigError, UsageError

VARIABLES = {
    "SPANTRAIN_OUTER_MASTER": "m:7000",
    "SPANTRAIN_OUTER_TOKEN": "st1secret",
    "SPANTRAIN_OUTER_CLUSTER": "lab",
    "SPANTRAIN_OUTER_INNER_STEPS": "16",
    "SPANTRAIN_OUTER_ENCRYPTED": "0",
}


def test_a_run_is_a_cluster_if_it_was_started_so():
    found = outer_cluster(VARIABLES)
    assert found is not None
    assert (found.master, found.cluster, found.inner_steps, found.encrypted) == ("m:7000", "lab", 16, False)
    assert "secret" not in repr(found)
    assert outer_cluster({}) is None


def test_half_of_the_variables_are_refused():
    with pytest.raises(UsageError, match="SPANTRAIN_OUTER_TOKEN is not set"):
        outer_cluster({"SPANTRAIN_OUTER_MASTER": "m:7000"})


def test_devices_that_reach_no_master_are_refused():
    check_outer(SimpleNamespace(testbed=None))
    with pytest.raises(ConfigError, match=r"emulated network, which leads to no master \(--no-network\)"):
        check_outer(SimpleNamespace(testbed=object()))
