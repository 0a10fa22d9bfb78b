"""What is known of the ways in which frameworks sum gradients."""

from dataclasses import replace

import pytest

from spantrain.core.cluster import Device
from spantrain.core.plan import DEFAULT_BUCKET_BYTES, GradientSums, SumModel
from spantrain.cost.replicas import ReplicaCost
from spantrain.cost.sums import default_sums, fill_buckets, nccl_between, sum_options

MIB = 2**20


def card(name: str, backend: str, host: str | None = None) -> Device:
    return Device(name=name, kind="k", host=host or name, site="s", backend=backend, memory_bytes=1)


@pytest.mark.parametrize(
    ("backends", "nccl"),
    [
        ([("a", "cuda:0"), ("b", "cuda:0")], True),
        ([("a", "cuda:0"), ("a", "cuda:1")], True),
        ([("a", "cuda:0"), ("a", "cuda:0")], False),
        ([("a", "cuda:0"), ("b", "cpu")], False),
        ([("a", "emulated"), ("b", "emulated")], False),
    ],
    ids=["two hosts", "two cards", "one card", "mixed", "emulated"],
)
def test_nccl_is_for_cuda_cards_that_are_all_different(backends, nccl):
    devices = [card(f"d{number}", backend, host) for number, (host, backend) in enumerate(backends)]
    assert nccl_between(devices) is nccl


@pytest.mark.parametrize("model", SumModel)
def test_settings_are_the_models_own_and_the_default_is_first(model):
    for total in (0.0, 1.0, 1e6, 3e9):
        options = sum_options(model, total)
        assert options[0] == default_sums(model)
        assert {sums.model for sums in options} == {model}
        assert len(set(options)) == len(options)


def test_torch_fills_a_small_bucket_first():
    sums = default_sums(SumModel.TORCH_DDP)
    found = fill_buckets([30 * MIB, 30 * MIB], sums)
    assert [bucket.size_bytes / MIB for bucket in found] == [1, 25, 25, 9]
    assert [bucket.last_unit for bucket in found] == [1, 1, 0, 0]


@pytest.mark.parametrize("total_mib", [1, 64, 500])
def test_ours_are_tried_from_the_whole_to_a_sixteenth_and_with_all_that_torch_has(total_mib):
    options = sum_options(SumModel.SPANTRAIN, total_mib * MIB)
    sizes = {sums.bucket_bytes / MIB for sums in options}
    assert sizes >= {DEFAULT_BUCKET_BYTES / MIB, *(total_mib / 2**power for power in range(3))}
    if total_mib <= 128:
        assert total_mib / 16 in sizes
    unit_bytes = [total_mib * MIB / 4] * 4
    cut = {fill_buckets(unit_bytes, sums) for sums in options}
    assert cut >= {fill_buckets(unit_bytes, sums) for sums in sum_options(SumModel.TORCH_DDP, total_mib * MIB)}


@pytest.mark.parametrize("field", ["bucket_bytes", "first_bucket_bytes", "at_once"])
def test_settings_must_be_positive(field):
    with pytest.raises(ValueError, match=rf"{field} must be (at least|from) 1.*, got 0"):
        GradientSums(**{field: 0})


def test_rings_of_cuda_cards_stream_and_others_wait(cost_profile, make_cost_plan):
    (stage,) = make_cost_plan((3, {"a0": 1, "a1": 1}), size=4).stages
    cluster = cost_profile.cluster
    cards = tuple(replace(device, backend=f"cuda:{number}") for number, device in enumerate(cluster.devices))
    emulated = ReplicaCost(cost_profile).end_of_step_s(stage)
    streaming = ReplicaCost(replace(cost_profile, cluster=replace(cluster, devices=cards))).end_of_step_s(stage)
    # Gloo's receivers send a word for each half: twice a millisecond.
    assert sum(emulated) == pytest.approx(sum(streaming) + 2e-3)
