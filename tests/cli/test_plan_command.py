"""`spantrain plan` and `spantrain explain` from the outside: files, JSON, tables, refusals."""

import json
from dataclasses import replace

import pytest

from spantrain.cli.render.plan import picture_lines
from spantrain.config.artefacts import read_plan
from spantrain.core.plan import Replica
from spantrain.formats.registry import WireFormat
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec
from testing.programs import needs_no_torch

KEYS = {
    "plan", "search_s", "step_s_predicted", "samples_per_s_predicted", "peak_bytes", "best_single_device",
    "best_single_site", "reasons", "strategies", "chosen",
}  # fmt: skip
FIGURES = {
    "step_s", "own_estimate_s", "samples_per_s", "money_per_step", "joules_per_sample", "peak_bytes", "search_s",
    "devices_used", "fits",
}  # fmt: skip
PRESET = ("--preset", "laptop", "--model", "gpt2-tiny", "--global-batch", 8)


def test_json_has_every_strategy_and_the_chosen_one_is_best(spantrain, profile_path):
    ended = spantrain("plan", profile_path, "--global-batch", 32, "--strategy", "spantrain-dp,ddp,1f1b", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert set(found) >= KEYS
    assert set(found["strategies"]) == {"spantrain-dp", "ddp", "1f1b"}
    for figures in found["strategies"].values():
        assert set(figures) >= FIGURES
    best = min(found["strategies"], key=lambda name: found["strategies"][name]["step_s"])
    assert found["chosen"] == best
    assert found["step_s_predicted"] == found["strategies"][best]["step_s"]


def test_it_needs_no_torch(profile_path, tmp_path):
    out = str(tmp_path / "plan.json")
    needs_no_torch("plan", str(profile_path), "--global-batch", "8", "--strategy", "single-device", "--out", out)


def test_the_default_is_never_worse_than_one_site(spantrain, profile_path):
    found = json.loads(spantrain("plan", profile_path, "--global-batch", 32, "--json").out)
    assert found["step_s_predicted"] <= found["best_single_site"]["step_s"]
    assert {"single-site", "single-device"} < set(found["strategies"])


def test_no_second_level_says_what_it_costs(spantrain):
    ended = spantrain("plan", *PRESET, "--strategy", "spantrain", "--no-second-level", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    part, whole = (found["strategies"][name]["samples_per_s"] for name in ("spantrain", "spantrain with second level"))
    assert found["samples_per_s_predicted"] == part
    assert part <= whole
    assert f"{part:.4g} samples/s; with them {whole:.4g}" in found["reasons"][0]
    ended = spantrain("plan", *PRESET, "--no-second-level")
    assert ended.code == 2
    assert "--no-second-level goes with --strategy spantrain" in ended.err


def test_a_preset_needs_no_measuring_and_says_so(spantrain, tmp_path):
    out = tmp_path / "p" / "plan.json"
    ended = spantrain("plan", *PRESET, "--strategy", "spantrain-dp", "--out", out)
    assert ended.code == 0, ended.err
    assert "nothing was measured" in ended.out
    assert "✓ spantrain-dp" in ended.out
    assert "stage 0: units 0-" in ended.out
    for site in ("lab", "office", "home"):
        assert ended.out.count(f"Site {site} is ") == 1
    plan = read_plan(out)
    assert plan.strategy == "spantrain-dp"
    assert spantrain("simulate", out, "--json").code == 0


def test_a_plan_is_made_for_the_users_data_and_length(spantrain, tmp_path):
    """As `spantrain train --model` would make it."""
    (tmp_path / "text.txt").write_text("a" * 4000)
    out = tmp_path / "plan.json"
    words = ("--sequence-length", 32, "--data", tmp_path / "text.txt")
    ended = spantrain("plan", *PRESET, "--strategy", "single-device", *words, "--out", out)
    assert ended.code == 0, ended.err
    assert (read_plan(out).model.sequence_length, read_plan(out).model.dataset) == (32, f"text:{tmp_path / 'text.txt'}")
    refused = spantrain("plan", tmp_path / "plan.profile.json", "--global-batch", 8, *words)
    assert refused.code == 2
    assert "has its model and data already" in refused.err


def test_the_picture_says_what_is_divided(spantrain):
    ended = spantrain("plan", *PRESET, "--strategy", "fsdp")
    assert ended.code == 0, ended.err
    assert "parameters, gradients and optimizer state divided among replicas (zero3)" in ended.out


def test_the_picture_names_parts_of_tensors_and_rounded_cuts(laptop_profile):
    outcome = make_plan(laptop_profile, JobSpec(global_batch=32), PlanOptions(strategies=("gpipe",)))
    first, second = outcome.plan.stages[:2]
    pair = Replica(devices=("lab-0", "lab-1"), sample_share=1.0, in_flight_limit=32, tp_shares=(2.0, 1.0))
    alone = Replica(devices=("office-nx",), sample_share=1.0, in_flight_limit=32)
    stages = (
        replace(first, replicas=(pair,), wire_format=WireFormat.BFLOAT16),
        replace(second, replicas=(alone,), end_unit=outcome.plan.stages[-1].end_unit),
    )
    lines = picture_lines(replace(outcome, plan=replace(outcome.plan, stages=stages)))
    assert any("lab-0 67%+lab-1 33% of each tensor (" in line for line in lines)
    assert [line for line in lines if "sent as" in line] == ["  ↕ sent as bfloat16"]


def test_explain_reads_what_plan_wrote(spantrain, tmp_path):
    out = tmp_path / "plan.json"
    assert spantrain("plan", *PRESET, "--strategy", "dapple", "--out", out).code == 0
    found = json.loads(spantrain("explain", out, "--json").out)
    assert found["limited_by"]
    assert all(entry["times_as_fast"] > 1 for entry in found["helps"])
    ended = spantrain("explain", out)
    assert ended.code == 0
    assert "Limited by" in ended.out


def test_constraints_shape_the_plan(spantrain):
    found = json.loads(
        spantrain(
            "plan",
            *PRESET,
            "--leave-out",
            "home",
            "--quota",
            "lab/xavier-nx=1",
            "--keep",
            "office-tx2",
            "--json",
            "--strategy",
            "spantrain-dp,ddp",
        ).out
    )
    devices = [
        name for stage in found["plan"]["stages"] for replica in stage["replicas"] for name in replica["devices"]
    ]
    assert "office-tx2" in devices
    assert not {"home-tx2", "home-nano", "lab-1"} & set(devices)
    assert any(reason.startswith("Left out as asked: home") for reason in found["reasons"])
    assert "Site office is in: it was to be kept." in found["reasons"]


def test_any_schedule_is_never_worse_than_the_usual_one(spantrain):
    """Where another schedule is better than the plain rule, too, the order of work is searched."""
    usual, free = (
        json.loads(spantrain("plan", *PRESET, "--strategy", "spantrain-dp", "--json", *words).out)
        for words in ((), ("--schedule", "auto"))
    )
    assert free["step_s_predicted"] <= usual["step_s_predicted"]


def test_the_cheapest_plan_costs_no_more_than_the_fastest(spantrain):
    strategies = ("--strategy", "spantrain-dp,single-site,single-device")
    fast, cheap = (
        json.loads(spantrain("plan", *PRESET, *strategies, "--objective", objective, "--json").out)
        for objective in ("throughput", "cost")
    )
    money = [found["strategies"][found["chosen"]]["money_per_step"] for found in (fast, cheap)]
    assert money[1] <= money[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--keep", "lab", "--leave-out", "lab"), ("lab is both to be kept and left out",)),
        (("--quota", "tx2=7"), ("a quota of 7 tx2", "has 2 of them", "3 xavier-nx")),
        (("--quota", "lab/tx2=1"), ("a quota of 1 tx2 in lab", "has 0 of them", "lab: 2 xavier-nx")),
        (("--quota", "nowhere/tx2=1"), ("a quota of 1 tx2 in nowhere", "no such site")),
        (("--quota", "lab/xavier-nx=0", "--keep", "lab"), ("lab is to be kept, and the quotas leave none",)),
        (("--quota", "tx2"), ("--quota tx2", "KIND=N")),
        (("--min-throughput", "1e9"), ("no plan keeps the constraints", "at least 1e+09 wanted")),
        (("--max-step-s", "0"), ("--max-step-s 0", "a number over 0")),
        (("--min-throughput", "nan"), ("--min-throughput nan", "a number over 0")),
        (("--strategy", ","), ("names no strategy",)),
        (("--strategy", "hetpip"), ("got 'hetpip'", "hetpipe")),
        (("--objective", "fun"), ("fun", "throughput")),
        (("--cluster", "x.yaml"), ("either",)),
    ],
)
def test_wrong_options_are_refused_in_one_message(spantrain, words, says):
    ended = spantrain("plan", *PRESET, *words)
    assert ended.code == 2, ended.err
    assert ended.out == ""
    assert ended.err.count("Error") == 1
    plain = " ".join(ended.err.replace("│", " ").split())
    for text in says:
        assert text in plain, plain


def test_nothing_that_fits_is_refused_with_the_bytes(spantrain, tight_profile_path):
    ended = spantrain("plan", tight_profile_path, "--global-batch", 32, "--strategy", "spantrain-dp,gpipe")
    assert ended.code == 2
    assert ended.err.count("Error") == 1
    assert "has 1 MiB" in ended.err
    assert "gpipe: with micro-batches of" in ended.err


def test_a_kind_that_was_not_measured_is_named_with_the_command(spantrain, laptop_profile, tmp_path):
    from dataclasses import replace

    from spantrain.config.artefacts import write_profile

    timings = tuple(timing for timing in laptop_profile.timings if timing.kind != "tx2")
    path = tmp_path / "profile.json"
    write_profile(replace(laptop_profile, timings=timings), path)
    ended = spantrain("plan", path, "--global-batch", 32)
    assert ended.code == 2
    assert "lacks float32 times of gpt2-tiny for tx2" in ended.err
    assert "spantrain profile --cluster FILE" in ended.err
    left = spantrain("plan", path, "--global-batch", 32, "--leave-out", "office-tx2", "--leave-out", "home-tx2")
    assert left.code == 0, left.err


@pytest.mark.parametrize("words", [(), ("--preset", "laptop")])
def test_what_is_to_be_planned_must_be_said(spantrain, words):
    ended = spantrain("plan", "--global-batch", 8, *words)
    assert ended.code == 2
    assert "--model" in ended.err


def test_names_may_leave_their_hyphens_out(spantrain):
    ended = spantrain("plan", "--preset", "spantrain-setting1", "--model", "resnettiny", "--global-batch", 8,
                      "--strategy", "ddp,eddl", "--json")  # fmt: skip
    assert json.loads(ended.out)["plan"]["model"]["name"] == "resnet-tiny"


def test_a_range_of_batches_is_planned_for_and_the_smallest_that_is_nearly_the_best_taken(spantrain):
    asked = ("plan", "--preset", "laptop", "--model", "gpt2-tiny", "--strategy", "ddp", "--json")
    ended = spantrain(*asked, "--global-batch", "24..96")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    rates = {row["global_batch"]: row["samples_per_s"] for row in found["batches"]}
    assert list(rates) == [24, 48, 96]
    chosen = found["plan"]["global_batch"]
    assert chosen == min(size for size, rate in rates.items() if rate >= max(rates.values()) / 1.01)
    assert found["samples_per_s_predicted"] == rates[chosen]
    assert any("A learning rate that was good for 24 samples" in reason for reason in found["reasons"])
    assert ended.err.splitlines()[0] == f"24: {rates[24]:.3g} samples/s"
    assert "batches" not in json.loads(spantrain(*asked, "--global-batch", 24).out)


@pytest.mark.parametrize(("optimizer", "times"), [("adamw", "2 times"), ("sgd", "4 times")])
def test_a_larger_batch_comes_with_what_it_asks_of_the_learning_rate(spantrain, optimizer, times):
    asked = (
        "plan",
        "--preset",
        "laptop",
        "--model",
        "gpt2-tiny",
        "--strategy",
        "single-device",
        "--optimizer",
        optimizer,
    )
    found = json.loads(spantrain(*asked, "--global-batch", "1..4", "--json").out)
    assert found["plan"]["global_batch"] == 4
    assert any(f"wants about {times} as much" in reason for reason in found["reasons"])


@pytest.mark.parametrize("batch", ["0", "96..24", "24..", "many", "1..99999999"])
def test_a_batch_that_is_none_is_refused(spantrain, batch):
    ended = spantrain("plan", "--preset", "laptop", "--model", "gpt2-tiny", "--global-batch", batch)
    assert ended.code == 2
    assert f"--global-batch {batch}: give samples, 1 to " in ended.err
