"""An emulated device takes for recomputed units what the planner reckons."""

from dataclasses import replace

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.action import Op
from spantrain.core.plan import Replica, Stage
from spantrain.core.span import equal_spans
from spantrain.cost.replicas import ReplicaCost
from spantrain.models.catalog.catalog import resolve_model
from spantrain.runtime.step.emulation import emulated_unit_seconds


@pytest.mark.parametrize("recompute", [(), (3,), (2, 5), (2, 3, 4, 5)])
def test_all_operations_take_the_same_in_both(recompute) -> None:
    profile = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    replica = Replica(devices=("lab-0",), sample_share=1.0, in_flight_limit=8)
    stage = Stage(first_unit=2, end_unit=6, replicas=(replica,), micro_batches=equal_spans(8, 4))
    stage = replace(stage, recompute=recompute)
    units = [profile.graph.units[unit] for unit in stage.units]
    positions = [unit - stage.first_unit for unit in recompute]
    shares = {"lab-0": [1.0] * 4}
    emulated = emulated_unit_seconds(profile.cluster, "lab-0", shares, "float32", units, recompute=positions)
    cost = ReplicaCost(profile)
    for op in Op:
        assert sum(emulated(op, 4)) == pytest.approx(cost.action_s(stage, replica, op, 4))
