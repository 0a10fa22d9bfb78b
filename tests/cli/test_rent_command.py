"""`spantrain plan --offers` and `--prices` from the outside: files, JSON, refusals."""

import json

import pytest

from spantrain.config.artefacts import read_plan
from spantrain.config.cluster_file import load_cluster
from spantrain.core.quantities import format_speed

OFFERS = """
offers:
  - {provider: mine, region: east, kind: a100, per_host: 2, most: 4, on_demand: 2.5, network: 100 Gbit/s}
  - {provider: mine, region: west, kind: t4, per_host: 1, most: 2, on_demand: 0.5, spot: 0.2,
     preemptions_per_hour: 0.1, network: 10 Gbit/s}
"""
MODEL = ("--model", "gpt2-tiny", "--global-batch", 32, "--dtype", "float32")


@pytest.fixture
def offers(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(OFFERS)
    return path


def test_what_to_rent_is_shown_and_written_so_that_plan_understands_it(spantrain, offers, tmp_path):
    out, picture = tmp_path / "plan.json", tmp_path / "rent.svg"
    ended = spantrain(
        "plan", "--offers", offers, *MODEL, "--tokens", "1e9", "--budget", 100, "--out", out, "--out-plot", picture
    )
    assert ended.code == 0, ended.err
    assert "what to rent" in ended.out
    assert "One good node alone" in ended.out
    assert "stage 0: units 0-" in ended.out
    assert "✓" in ended.out
    assert picture.read_text().startswith("<svg")
    predicted = json.loads(out.read_text())["prediction"]
    assert f"the choice does {format_speed(predicted['samples_per_s'])} samples/s" in ended.out
    cluster = tmp_path / "plan.cluster.yaml"
    assert {device.name for device in load_cluster(cluster).devices} >= set(read_plan(out).devices)
    again = spantrain("plan", "--cluster", cluster, *MODEL, "--objective", "cost", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["strategies"]["auto"]["money_per_step"] > 0
    (tmp_path / "free.yaml").write_text("rented: {a100: 0, t4: 0}")
    for words in ((), ("--prices", tmp_path / "free.yaml")):
        ended = spantrain("simulate", out, *words, "--json")
        assert ended.code == 0, ended.err
        (figures,) = json.loads(ended.out)["schedules"].values()
        assert figures["money_per_step"] > 0  # a site's own price goes before any file's


def test_json_has_the_choice_one_node_and_the_frontier(spantrain, offers):
    ended = spantrain("plan", "--offers", offers, *MODEL, "--deadline", "1000 h", "--tokens", "1e9", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["unit"] == "tokens"
    assert found["chosen"]["hours"] <= 1000
    assert found["one_node"]["machines"][0]["hosts"] == 1
    assert found["chosen"] in found["frontier"]
    assert {"what", "usd", "egress_usd", "usd_per_million", "lost_ratio", "plan"} <= set(found["chosen"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--budget", "5", "--deadline", "2 h", "--tokens", "1e9"), "--budget and --deadline are 2 limits"),
        ((), "what is wanted? Give --tokens N"),
        (("--budget", "5"), "--budget needs --tokens N"),
        (("--samples", "5"), "gpt2-tiny is trained on tokens; give --tokens N"),
        (("--tokens", "1e9", "--deadline", "soon"), "--deadline: 'soon' needs a number"),
        (("--tokens", "1e9", "--budget", "0.000001"), "it would take --budget"),
        (("--tokens", "1e9", "--preset", "laptop"), "does not go with --preset"),
        (("--tokens", "1e9", "--objective", "cost"), "does not go with --objective"),
        (("--tokens", "1e9", "--out-plot", "p.pdf"), "--out-plot p.pdf: name a file that ends in .svg or .png"),
        (("--tokens", "1e9", "--leave-out", "mine"), "nothing is on offer"),
        (("--tokens", "1e9", "--leave-out", "mne"), "--leave-out mne: nothing of that name is on offer"),
        (("--tokens", "1e9", "--prices", "p.yaml"), "does not go with --prices"),
    ],
)
def test_what_is_wrong_is_told_in_one_message(spantrain, offers, words, says):
    ended = spantrain("plan", "--offers", offers, *MODEL, *words)
    assert ended.code == 2
    assert says in ended.err
    assert "Traceback" not in ended.err


def test_models_of_images_are_trained_on_samples(spantrain, offers):
    words = ("plan", "--offers", offers, "--model", "resnet-tiny", "--global-batch", 32, "--dtype", "float32")
    refused = spantrain(*words, "--tokens", "1e9")
    assert refused.code == 2
    assert "resnet-tiny is trained on samples; give --samples N" in refused.err
    assert spantrain(*words, "--samples", "1e6").code == 0


def test_a_bad_line_of_an_offers_file_is_told(spantrain, offers):
    offers.write_text(OFFERS.replace("kind: a100", "kind: a100x"))
    ended = spantrain("plan", "--offers", offers, *MODEL, "--tokens", "1e9")
    assert ended.code == 2
    assert f"{offers}: line 3, offers[0].kind: unknown device kind 'a100x'; did you mean 'a100' or" in ended.err


def test_options_of_offers_need_them_and_a_plan_needs_its_batch(spantrain):
    alone = spantrain("plan", "--preset", "laptop", *MODEL, "--budget", "5")
    assert alone.code == 2
    assert "--budget: needs --offers today" in alone.err
    without = spantrain("plan", "--preset", "laptop", "--model", "gpt2-tiny")
    assert without.code == 2
    assert "--global-batch N" in without.err


def test_prices_of_a_file_stand_in_the_place_of_the_shipped_ones(spantrain, tmp_path):
    path = tmp_path / "p.yaml"
    words = (
        "plan",
        "--preset",
        "laptop",
        *MODEL,
        "--strategy",
        "ddp",
        "--objective",
        "cost",
        "--prices",
        path,
        "--json",
    )
    path.write_text("rented: {tx2: 1, xavier-nx: 1}")
    asked = spantrain(*words)
    assert asked.code == 2
    assert "no price for jetson-nano at home: add the kind under `rented`" in asked.err
    found = []
    for usd in (1, 3):
        path.write_text(f"rented: {{tx2: {usd}, xavier-nx: {usd}, jetson-nano: {usd}}}\negress: {{default: 0}}")
        ended = spantrain(*words)
        assert ended.code == 0, ended.err
        found.append(json.loads(ended.out)["strategies"]["ddp"]["money_per_step"])
    assert found[1] == pytest.approx(3 * found[0], rel=1e-3)
