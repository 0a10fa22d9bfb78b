"""How frameworks are set up on a cluster: what divides, what is left out, what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.app.profiling.describe import described_profile
from spantrain.app.profiling.slowing import sound_speed
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.errors import ConfigError, InfeasiblePlanError, UsageError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import JobSpec
from spantrain_studies.comparison.figures import at_network_speed, cut_down, with_bandwidth
from spantrain_studies.comparison.fit import devices_at_once, fitting_devices_per_site
from spantrain_studies.comparison.layouts import layouts
from spantrain_studies.comparison.methods import GROUPS, METHODS, MethodKind, methods_named
from spantrain_studies.comparison.worker.orders import Framework

MODEL = resolve_model("gpt2-tiny")
PROFILE = described_profile(load_preset("laptop"), MODEL)
LARGE = described_profile(load_preset("spantrain-setting-1"), MODEL)


def ways(framework: Framework, batch: int, profile=PROFILE):
    return layouts(framework, profile, batch, Evaluator(profile, JobSpec(global_batch=batch)))


@given(framework=st.sampled_from(list(Framework)), batch=st.integers(min_value=2, max_value=48))
def test_every_layout_divides_and_can_be_ordered(framework, batch):
    """Whatever the batch: equal parts, every unit once, no device twice."""
    try:
        found = ways(framework, batch)
    except InfeasiblePlanError:
        found = ()
    for layout in found:
        order = layout.order(PROFILE, TrainJob(steps=1))  # checks that everything divides
        units = [unit for first, end in layout.cuts for unit in range(first, end)]
        assert units == list(range(len(PROFILE.graph.units)))
        names = {device.name for device in PROFILE.cluster.devices}
        assert set(order.devices) | set(layout.left_out) == names
        assert len(set(order.devices)) == len(order.devices) >= 2


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(InfeasiblePlanError, match="1 samples"):
        ways(Framework.DDP, 1)


def test_all_devices_are_used_where_counts_divide():
    for framework in Framework:
        assert ways(framework, 48)[0].left_out == ()


def test_slowest_devices_are_left_out_where_samples_do_not_divide():
    (best, *_) = ways(Framework.DDP, 20)
    assert best.left_out == ("home-nano",)
    assert "without home-nano" in best.what


def test_more_devices_than_units_leave_devices_out():
    """22 devices, 14 units: stages are 14, on the fastest devices, in the cluster's order."""
    best = ways(Framework.GPIPE, 56, LARGE)[0]
    assert len(best.cuts) == len(best.plan.devices) == len(LARGE.graph.units)
    kinds = [LARGE.cluster.device_by_name[name].kind for name in best.plan.devices]
    assert kinds == ["rtx-4090"] * 12 + ["rtx-3090"] * 2


def test_zero_bubble_has_two_stages_a_device_where_units_suffice():
    best = ways(Framework.ZERO_BUBBLE, 48)[0]
    assert len(best.cuts) == 2 * len(best.plan.devices)
    order = best.order(PROFILE, TrainJob(steps=1))
    assert order.local_stages(1) == (1, 7)


def test_a_v_gives_the_last_device_two_neighbours_and_the_first_both_ends():
    order = ways(Framework.ZERO_BUBBLE_V, 48)[0].order(PROFILE, TrainJob(steps=1))
    assert [order.local_stages(rank) for rank in (0, 1, 5)] == [(0, 11), (1, 10), (5, 6)]
    with pytest.raises(ValueError, match="torch-zbv: two stages for each of 6 devices, got 6"):
        replace(order, cuts=((0, 14), *order.cuts[:5]))


@pytest.mark.parametrize("framework", [Framework.INTERLEAVED, Framework.ZERO_BUBBLE_V])
def test_two_stages_a_device_or_fewer_devices(framework):
    """14 units on 22 devices: seven devices with two stages each, where one stage each would be another method."""
    for found in ways(framework, 56, LARGE):
        assert len(found.cuts) == 2 * len(found.plan.devices) == len(LARGE.graph.units)
        assert len(found.left_out) == 22 - 7
        assert "14 stages" in found.what


def test_interleaved_holds_what_torch_s_order_has_in_flight():
    """Six devices in rounds of six: one round of a first half, and halves on the way to the last device and back."""
    found = ways(Framework.INTERLEAVED, 48)[0]
    size = 48 // found.micro_batches
    assert found.micro_batches % 6 == 0
    assert found.micro_batches > 9
    assert [stage.replicas[0].in_flight_limit // size for stage in found.plan.stages] == [9, 8, 7, 6, 5, 4]


def test_methods_by_name_and_group():
    assert [method.name for method in methods_named(["torch-zb", "baselines"])] == [
        "torch-zb", "best-device", "best-site",
    ]  # fmt: skip
    assert {method.kind for method in methods_named(["frameworks"])} == {MethodKind.FRAMEWORK}
    assert set(GROUPS["all"]) == set(METHODS)
    adapters = {method.name: method.adapter for method in methods_named(["adapters", "best-site"])}
    assert adapters == {"auto": "auto", "auto-adapter-off": "off", "auto-adapter-paper": "paper", "best-site": "off"}
    with pytest.raises(UsageError, match="did you mean 'torch-1f1b'"):
        methods_named(["torch-1fb"])


def test_cluster_is_cut_down_evenly_over_hosts():
    cluster = cut_down(load_preset("spantrain-setting-1"), 2)
    hosts = {device.host for device in cluster.devices_at("cloud")}
    assert [len(cluster.devices_at(site.name)) for site in cluster.sites] == [2, 2, 2]
    assert len(hosts) == 2, "one device of each of two hosts, not two of one"
    assert {host.name for host in cluster.hosts} == {device.host for device in cluster.devices}


def test_bandwidth_is_set_between_sites_or_inside_a_single_one():
    between = with_bandwidth(load_preset("laptop"), 5e6)
    assert {link.bandwidth_bytes_per_s for link in between.links} == {5e6}
    assert {site.bandwidth_bytes_per_s for site in between.sites} == {125e6}
    inside = with_bandwidth(load_preset("asteroid-b"), 5e6)
    assert [site.bandwidth_bytes_per_s for site in inside.sites] == [5e6]
    slower = at_network_speed(load_preset("laptop"), 0.5)
    assert [link.bandwidth_bytes_per_s * 2 for link in slower.links] == [
        link.bandwidth_bytes_per_s for link in load_preset("laptop").links
    ]
    with pytest.raises(ConfigError, match="network-speed"):
        at_network_speed(load_preset("laptop"), 0.0)


def test_devices_are_slowed_with_those_that_share_a_processor_and_never_sped_up():
    laptop, graph = load_preset("laptop"), PROFILE.graph
    slow = sound_speed(laptop, graph, 0.1)
    assert slow < laptop.emulated_speed
    assert sound_speed(laptop, graph, 0.1, at_once=2.0) == pytest.approx(slow / 2, rel=0.05)
    assert sound_speed(laptop, graph, 1e-9) == laptop.emulated_speed


def test_devices_at_once_are_those_of_the_quickest_method_or_a_part_of_all():
    laptop, graph = load_preset("laptop"), PROFILE.graph
    all_at_once = devices_at_once(laptop, graph, 1, None)
    assert 1.0 < all_at_once < len(laptop.devices)
    assert devices_at_once(laptop, graph, 1000, None) == 1.0
    assert devices_at_once(laptop, graph, 1, 1e-9) == pytest.approx(all_at_once / 2.5)


def test_no_more_devices_than_the_machine_carries():
    cluster = load_preset("spantrain-setting-1")
    assert [fitting_devices_per_site(cluster, most) for most in (1, 6, 8, 14, 21, 22)] == [1, 2, 2, 5, 11, None]
