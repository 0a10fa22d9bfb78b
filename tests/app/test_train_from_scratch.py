"""From a model to training in one go: the run's folder, and profiles that still hold."""

import datetime
from dataclasses import replace

import pytest
import torch

from spantrain.app.profiling.slowing import slowed
from spantrain.app.training.train_from_scratch import ScratchRequest, kept_profile, run_folder_for
from spantrain.config.artefacts import write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.models.catalog.catalog import resolve_model
from spantrain.version import VERSION

NOW = datetime.datetime(2026, 5, 4, 3, 2, 1)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("gpt2-tiny", "gpt2-tiny-20260504-030201"),
        ("hf:examples/llama-tiny", "llama-tiny-20260504-030201"),
        ("hf:examples/llama-tiny/", "llama-tiny-20260504-030201"),
        ("examples/my_model.py:build", "my_model-build-20260504-030201"),
        ("mine.models:build", "mine.models-build-20260504-030201"),
    ],
)
def test_folders_are_named_by_model_and_time_and_never_taken_twice(tmp_path, name, folder):
    assert run_folder_for(name, NOW, tmp_path).name == folder
    (tmp_path / folder).mkdir()
    assert run_folder_for(name, NOW, tmp_path).name == f"{folder}-2"


def test_a_profile_is_taken_again_only_if_it_answers_the_same_question(tmp_path, law_profile):
    cluster, model = load_preset("laptop"), resolve_model("gpt2-tiny")
    profile = law_profile(cluster, model)
    made = replace(
        profile.provenance,
        spantrain_version=VERSION,
        torch_version=torch.__version__,
        method="compute: emulated; links: testbed",
    )
    profile = replace(profile, provenance=made)
    request = ScratchRequest(cluster=cluster, model=model, job=TrainJob(steps=1), out=tmp_path)
    path = tmp_path / "profile.json"
    assert kept_profile(path, "testbed", request) is None
    write_profile(profile, path)
    assert kept_profile(path, "testbed", request) == profile
    assert kept_profile(path, "real", request) is None
    for other in (
        replace(request, dtype="bfloat16"),
        replace(request, model=resolve_model("gpt2-tiny", sequence_length=32)),
        replace(request, cluster=replace(cluster, emulated_speed=0.5), own_speed=True),
        replace(request, cluster=replace(cluster, emulated_speed=0.001)),
    ):
        assert kept_profile(path, "testbed", other) is None
    slower = replace(profile, cluster=replace(cluster, emulated_speed=0.001))
    write_profile(slower, path)
    assert kept_profile(path, "testbed", request) == slower
    assert kept_profile(path, "testbed", replace(request, own_speed=True)) is None
    write_profile(replace(profile, provenance=replace(made, torch_version="0")), path)
    assert kept_profile(path, "testbed", request) is None
    path.write_text("{}")
    assert kept_profile(path, "testbed", request) is None


def test_emulated_devices_are_slowed_until_real_computation_hides_in_their_time():
    cluster, model = load_preset("laptop"), resolve_model("gpt2-tiny")
    fast = replace(cluster, emulated_speed=0.5)
    slow, says = slowed(fast, model, dtype="float32", global_batch=1)
    assert slow.emulated_speed < 0.5
    assert replace(slow, emulated_speed=0.5) == fast
    assert f"slowed to {slow.emulated_speed:g} of their kinds' speed" in says
    snail = replace(cluster, emulated_speed=1e-5)
    assert slowed(snail, model, dtype="float32", global_batch=1) == (snail, "")


def test_a_step_that_would_last_minutes_is_told_and_not_made():
    fast = replace(load_preset("laptop"), emulated_speed=0.5)
    kept, says = slowed(fast, resolve_model("gpt2-tiny"), dtype="float32", global_batch=5000)
    assert kept == fast
    assert "partly this machine's" in says
    assert "--emulated-speed" in says
