"""A small model on slowed devices and links weighs on them what a large one does in life."""

from dataclasses import replace

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster
from spantrain.errors import ConfigError
from spantrain.models.catalog.catalog import resolve_model
from spantrain_studies.comparison.figures import cut_down, steps_within
from spantrain_studies.comparison.fit import FULL_SIZE, SettingOverrides, fit, paper_batch, sample_seconds, scale_match

BOARDS = load_preset("asteroid-b-100")
SITES = cut_down(load_preset("spantrain-setting-1"), 2)


def alike(cluster: Cluster, model: str, speed: float, full_global_batch: float | None = None):
    full = FULL_SIZE[model]
    graph, full_graph = (described_profile(cluster, resolve_model(name)).graph for name in (model, full))
    batch = full_global_batch or paper_batch(cluster.name, full, resolve_model(full).sequence_length)
    return scale_match(cluster, speed, graph, full_graph, full, batch)


@pytest.mark.parametrize("model", FULL_SIZE)
def test_compute_weighs_beside_traffic_what_it_does_in_life(model):
    like = alike(BOARDS, model, 2e-3)
    assert like.bounded == ()
    assert like.here.cuts == pytest.approx(like.full.cuts)
    assert like.here.sums == pytest.approx(like.full.sums, rel=0.1), "but for a batch that divides among the devices"
    assert like.global_batch % len(BOARDS.devices) == 0


def test_over_sites_the_way_weighs_alike_too():
    like = alike(SITES, "gpt2-tiny", 1.5e-3)
    assert like.bounded == ()
    assert like.here.latency == pytest.approx(like.full.latency)
    assert like.latency_scale != 1.0


def test_slower_devices_get_slower_links_and_the_same_batch():
    one, other = (alike(BOARDS, "gpt2-tiny", speed) for speed in (1e-2, 1e-3))
    assert one.network_speed == pytest.approx(10 * other.network_speed)
    assert one.global_batch == other.global_batch


def test_what_cannot_be_alike_is_told():
    """ResNet on graphics cards computes next to nothing beside what it sends: no link is so slow, no step so short."""
    like = alike(SITES, "resnet-tiny", 5e-5)
    assert like.here.cuts > like.full.cuts
    assert like.here.sums > like.full.sums, "traffic is lighter here than in life"
    assert [text.split()[0] for text in like.bounded] == ["the", "12", "no"]
    assert all(text in like.text for text in like.bounded)
    large = alike(BOARDS, "gpt2-tiny", 1e-3, 1e6)
    assert large.global_batch == 255
    assert "255 samples a step" in large.text


def test_where_nothing_is_sent_nothing_is_alike():
    alone = cut_down(BOARDS, 1)
    assert alike(replace(alone, links=()), "gpt2-tiny", 1e-3) is None


def test_a_device_more_shortens_a_sample():
    graph = described_profile(BOARDS, resolve_model("gpt2-tiny")).graph
    assert sample_seconds(BOARDS, graph, 1e-3) < sample_seconds(cut_down(BOARDS, 4), graph, 1e-3)
    assert sample_seconds(BOARDS, graph, 1e-3) == pytest.approx(2 * sample_seconds(BOARDS, graph, 2e-3))


def test_a_setting_is_fitted_once_devices_links_and_batch_together():
    fitted = fit(load_preset("spantrain-setting-1"), resolve_model("gpt2-tiny"), SettingOverrides(), lambda: 4e-3)
    scale = fitted.scale
    assert scale.like is not None
    assert scale.like.here.cuts == pytest.approx(scale.like.full.cuts)
    assert fitted.cluster.emulated_speed == scale.emulated_speed
    assert fitted.global_batch == scale.like.global_batch
    slowest = min(link.bandwidth_bytes_per_s for link in fitted.cluster.links)
    assert slowest == pytest.approx(100e6 / 8 * scale.network_speed)
    assert "like gpt2-small" in scale.text


def test_what_is_asked_for_is_not_fitted():
    model = resolve_model("gpt2-tiny")
    asked = SettingOverrides(global_batch=10, emulated_speed=0.01, network_speed=0.5)
    fitted = fit(BOARDS, model, asked, lambda: 4e-3)
    assert (fitted.global_batch, fitted.scale.emulated_speed, fitted.scale.network_speed) == (10, 0.01, 0.5)
    assert fitted.scale.like is None
    plain = fit(BOARDS, model, SettingOverrides(like="none"), lambda: 4e-3)
    assert (plain.scale.network_speed, plain.global_batch) == (1.0, 40)
    large = fit(BOARDS, model, SettingOverrides(like="gpt2-medium"), lambda: 4e-3)
    assert large.scale.like is not None
    assert large.scale.like.full_size == "gpt2-medium"
    with pytest.raises(ConfigError, match="gpt3"):
        fit(BOARDS, model, SettingOverrides(like="gpt3"), lambda: 4e-3)


@pytest.mark.parametrize("most_s", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("step_s", [0.01, 0.9, 4.0, 500.0])
def test_steps_end_in_time_and_something_is_measured(step_s, most_s):
    steps, warm_up = steps_within(8, step_s, most_s)
    assert 0 <= warm_up < steps <= 8
    assert steps == 1 or steps * step_s <= 2 * most_s
    assert warm_up or step_s > most_s
