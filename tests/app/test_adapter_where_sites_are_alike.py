"""An adapter simulated for a plan whose samples stay inside sites: only gradients cross."""

from spantrain.app.profiling.describe import described_profile
from spantrain.app.simulation.adapter import simulate_adapter
from spantrain.config.cluster_file import parse_cluster
from spantrain.config.traces.network_traces import network_trace
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import equal_spans
from spantrain.models.catalog.catalog import resolve_model

TWO_SITES = """
name: two
sites:
  - name: lab
    network: {bandwidth: 10 Gbit/s, latency: 0.1 ms}
    hosts: [{name: l0, devices: {t4: 1}}, {name: l1, devices: {t4: 1}}]
  - name: office
    network: {bandwidth: 10 Gbit/s, latency: 0.1 ms}
    hosts: [{name: o0, devices: {t4: 1}}, {name: o1, devices: {t4: 1}}]
links: [{between: all, bandwidth: 100 Mbit/s, latency: 10 ms}]
"""


def test_links_that_no_sample_crosses_slow_nothing_down():
    profile = described_profile(parse_cluster(TWO_SITES, source="two"), resolve_model("gpt2-tiny"))
    units = len(profile.graph.units)
    plan = Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=16,
        dtype="float32",
        stages=tuple(
            Stage(
                first_unit=first,
                end_unit=end,
                replicas=tuple(Replica(devices=(name,), sample_share=0.5, in_flight_limit=8) for name in names),
                micro_batches=equal_spans(16, 8),
            )
            for first, end, names in ((0, units // 2, ("l0", "o0")), (units // 2, units, ("l1", "o1")))
        ),
        schedule="critical-path",
    )
    calm, poor = (
        simulate_adapter(plan, profile, network_trace(trace), adapter="off", steps=2, optimizer="adamw").total_s
        for trace in ("drop-50:from=200%,until=201%", "drop-50")
    )
    assert poor == calm
