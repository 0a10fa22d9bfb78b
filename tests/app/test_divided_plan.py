"""The preset for it gets a plan that divides samples and tensors unequally, which training takes."""

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec
from spantrain.schedule.joint import joint_refusal


def test_unlike_devices_in_two_machines_are_a_grid():
    """Figure 7c of the SpanTrain paper (Chinese), with 1:3 in both directions."""
    profile = described_profile(load_preset("spantrain-cn"), resolve_model("gpt2-tiny"))
    plan = make_plan(profile, JobSpec(global_batch=64), PlanOptions(strategies=("spantrain",))).plan
    (stage,) = plan.stages
    names = [replica.devices for replica in stage.replicas]
    assert names == [("large-gpu0", "large-gpu1"), ("small-gpu0", "small-gpu1")]
    assert [sum(span.size for span in stage.replica_spans(number)) for number in (0, 1)] == [48, 16]
    for replica in stage.replicas:
        assert round(replica.tp_shares[0] / replica.tp_shares[1]) == 3
    assert joint_refusal(plan) == ""
