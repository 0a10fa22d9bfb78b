import pytest

from spantrain.cost.memory import BUFFERED_MICRO_BATCHES, MemoryCost, framework_bytes


@pytest.mark.parametrize(("optimizer", "ratio"), [("sgd", 2), ("momentum", 3), ("adamw", 4)])
def test_state_counts_parameters_gradients_and_optimizer(cost_profile, optimizer, ratio):
    assert MemoryCost(cost_profile, optimizer).state_bytes(range(1, 2)) == 4000 * ratio


def test_bfloat16_keeps_float32_masters_and_a_copy(cost_profile):
    assert MemoryCost(cost_profile, "sgd", "bfloat16").state_bytes(range(1, 2)) == 4000 * 2.5


def test_shared_parameters_of_one_stage_count_once(cost_profile):
    assert MemoryCost(cost_profile, "sgd").state_bytes(range(3)) == 2 * (12000 - 1000)


def test_need_has_all_its_parts(cost_profile):
    need = MemoryCost(cost_profile, "sgd").need(range(1, 2), "a0", in_flight=6, largest_span=2)
    assert need.activation_bytes == 6 * 5000
    assert need.buffer_bytes == BUFFERED_MICRO_BATCHES * 2 * 4 * 1000
    assert need.framework_bytes == framework_bytes("emulated") == framework_bytes("cuda:0") > framework_bytes("cpu")
    assert need.peak_bytes == need.state_bytes + need.activation_bytes + need.buffer_bytes + need.framework_bytes


def test_ends_of_the_model_have_one_neighbour_or_none(cost_profile):
    cost = MemoryCost(cost_profile)
    assert cost.buffer_bytes_per_sample(range(3)) == 0
    assert cost.buffer_bytes_per_sample(range(1)) == cost.buffer_bytes_per_sample(range(2, 3)) == 2 * 2000


def test_in_flight_is_what_fits_and_no_more_than_the_share(cost_profile):
    cost = MemoryCost(cost_profile, "sgd")
    assert cost.in_flight_limit_for(range(3), "a0", share_samples=8, largest_span=2) == 8
    fits = cost.in_flight_limit_for(range(3), "a0", share_samples=10**9, largest_span=2)
    memory = cost_profile.cluster.device_by_name["a0"].memory_bytes
    assert cost.need(range(3), "a0", fits, 2).peak_bytes <= memory < cost.need(range(3), "a0", fits + 1, 2).peak_bytes


def test_peaks_of_a_plan_name_every_device(cost_profile, make_cost_plan):
    plan = make_cost_plan((2, {"a0": 1, "a1": 1}), (3, {"b0": 1}))
    peaks = MemoryCost(cost_profile).plan_peak_bytes(plan)
    assert set(peaks) == {"a0", "a1", "b0"}
    assert peaks["a0"] == peaks["a1"]


def test_unknown_optimizer_is_refused(cost_profile):
    with pytest.raises(ValueError, match="lion"):
        MemoryCost(cost_profile, "lion")


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_over_time_are_those_of_the_peak(cost_profile, optimizer, dtype):
    cost = MemoryCost(cost_profile, optimizer, dtype)
    for units in (range(1), range(1, 2), range(1, 3), range(3)):
        sizes, need = cost.held_sizes(units, "a0"), cost.need(units, "a0", 1, 1)
        assert sizes.parameter_bytes + sizes.gradient_bytes + sizes.optimizer_bytes == need.state_bytes
        assert (sizes.activation_bytes_per_sample, sizes.framework_bytes) == (
            need.activation_bytes,
            need.framework_bytes,
        )
        held = sizes.held(activation_bytes=need.activation_bytes, received_bytes=7, sending_bytes=8)
        assert held.total_bytes == need.peak_bytes - need.buffer_bytes + 15
    middle = cost.held_sizes(range(1, 2), "a0")
    assert middle.input_bytes_per_sample == middle.output_gradient_bytes_per_sample == 1000


def test_a_lower_limit_than_the_memory(cost_profile):
    cost = MemoryCost(cost_profile, "sgd")
    least = cost.need(range(3), "a0", 0, 2).peak_bytes
    assert cost.in_flight_limit_for(range(3), "a0", 8, 2, limit_bytes=least + 3 * 15000) == 3
    assert cost.in_flight_limit_for(range(3), "a0", 8, 2, limit_bytes=least - 1) == 0
    assert cost.in_flight_limit_for(range(3), "a0", 8, 2, limit_bytes=10**15) == 8
