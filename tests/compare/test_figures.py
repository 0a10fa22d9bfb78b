"""Rows, tables, bounds and pictures from runs that were made up."""

import io
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.config.files.json_codec import to_json
from spantrain.core.profile import Profile
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOutcome
from spantrain.planner.request import JobSpec
from spantrain_studies.comparison.bounds import bounds_of
from spantrain_studies.comparison.figures import (
    ComparedSetting,
    CompareOutcome,
    ComparisonBounds,
    MeasuredRun,
    Scale,
    figures_of,
)
from spantrain_studies.comparison.picture import draw_comparison
from spantrain_studies.comparison.runs import framework_run, sent_bytes
from spantrain_studies.comparison.show import bound_lines, method_table, show_comparison, traffic_table
from spantrain_studies.comparison.worker.orders import FrameworkResult

RUN = MeasuredRun(
    step_s=(2.0, 4.0, 2.0),
    losses=(5.0, 4.5, 4.25),
    utilisation={"a": 0.5, "b": 0.7},
    peak_bytes={"a": 100, "b": 300},
    real_compute_ratio=0.05,
    link_bytes={"lab->office": 2048.0},
    host_bytes={"host-a": 4096.0},
)
REFERENCE = (5.0, 4.5, 4.5)


def outcome() -> CompareOutcome:
    first = figures_of([RUN, RUN], what="4 stages", global_batch=8, first_samples_per_s=None, reference=REFERENCE)
    slow = replace(RUN, step_s=(8.0, 8.0, 8.0), real_compute_ratio=0.4)
    second = figures_of(
        [slow], what="alone", global_batch=8, first_samples_per_s=4.0, reference=REFERENCE, step_s_predicted=4.0
    )
    profile = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    return CompareOutcome(
        methods={"ddp": first, "auto": second},
        refused={"fsdp": "too large"},
        bounds=bounds_of(profile, 8, None),
        setting=ComparedSetting(
            cluster="laptop",
            model="gpt2-tiny",
            methods=("ddp", "auto"),
            global_batch=8,
            steps=5,
            warm_up_steps=2,
            rounds=2,
            seconds_per_method=40.0,
            optimizer="adamw",
            seed=0,
            planned_by="data sheets",
            network="testbed",
            network_trace="",
            scale=Scale(devices=2, devices_before=6, emulated_speed=0.01, network_speed=1.0, compute_to_traffic=3.0),
            cores=2,
        ),
        emulated="all of it",
    )


def test_a_row_counts_the_middle_step_and_the_worst_loss():
    row = outcome().methods["ddp"]
    assert row.samples_per_s == 4.0
    assert row.samples_per_s_by_round == (4.0, 4.0)
    assert row.ratio_to_first == 1.0
    assert row.loss_error == 0.25
    assert (row.utilisation, row.peak_bytes, row.loss_last) == (pytest.approx(0.6), 300, 4.25)
    assert row.sound
    assert outcome().methods["auto"].ratio_to_first == 0.25
    assert not outcome().methods["auto"].sound


def test_where_links_change_the_mean_step_counts():
    row = figures_of([RUN], what="", global_batch=8, first_samples_per_s=None, reference=REFERENCE, changing=True)
    assert row.samples_per_s == pytest.approx(3.0)


def test_json_has_the_promised_keys():
    document = json.loads(json.dumps(to_json(outcome())))
    assert {"methods", "bounds", "setting", "emulated"} <= document.keys()
    keys = {"samples_per_s", "ratio_to_first", "bytes", "utilisation", "peak_bytes", "loss_last"}
    assert all(keys <= row.keys() for row in document["methods"].values())
    assert document["methods"]["ddp"]["bytes"] == {"lab->office": 2048.0}


def test_tables_show_methods_bytes_and_doubt():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(method_table(outcome()))
    console.print(traffic_table(outcome()))
    text = console.export_text()
    for words in ("ddp", "auto", "40%*", "4 s (+100.0%)", "lab->office", "2 KiB", "loss after 40"):
        assert words in text, words


def test_rounding_is_told_beside_what_losses_are_off_by(capsys):
    show_comparison(outcome())
    assert "is off by" not in capsys.readouterr().out
    show_comparison(replace(outcome(), rounding_error=0.07))
    assert "one process that cuts its batch otherwise is off by 7e-02 itself" in capsys.readouterr().out


def test_real_devices_have_no_emulated_time_no_doubt_and_no_bounds():
    real = figures_of(
        [replace(RUN, real_compute_ratio=None)], what="", global_batch=8, first_samples_per_s=None, reference=REFERENCE
    )
    none = ComparisonBounds(link_data_parallel=None, link_pipeline=None, latency=None)
    scale = replace(outcome().setting.scale, emulated_speed=None, compute_to_traffic=None)
    setting = replace(outcome().setting, scale=scale)
    found = replace(outcome(), methods={"ddp": real}, bounds=none, setting=setting)
    assert real.sound
    assert [column.header for column in method_table(found).columns][-3:] == ["off by", "step predicted", "how"]
    assert bound_lines(none) == []
    assert "2 of 6 devices, real ones" in draw_comparison(found, frozenset())
    assert draw_comparison(replace(found, methods={}), frozenset()).startswith("<svg")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def planned(profile) -> PlanOutcome:
    return make_plan(profile, JobSpec(global_batch=48))


def test_links_without_their_rates_bound_nothing(profile, planned):
    bounds = bounds_of(profile, 48, planned.plan, shaped=False)
    assert bounds.compute is not None
    assert len(bound_lines(bounds)) == 2


def test_picture_is_svg_with_a_bar_for_each_method():
    root = ElementTree.fromstring(draw_comparison(outcome(), frozenset({"auto"})))
    bars = [element for element in root if element.tag.endswith("rect")]
    assert len(bars) == 1 + 2
    assert float(bars[1].attrib["width"]) == pytest.approx(4 * float(bars[2].attrib["width"]), rel=0.01)


def test_a_step_ends_when_the_last_device_ends_it():
    one = FrameworkResult(
        start_s=1.0, step_ends_s=(3.0, 5.0, 8.0), loss_sums=(8.0, 6.0, 4.0), busy_s=(1.0, 1.0, 2.0),
        real_s=0.2, overruns=0, peak_bytes=7,
    )  # fmt: skip
    other = replace(one, start_s=2.0, step_ends_s=(4.0, 5.5, 7.0), loss_sums=(), busy_s=(1.0, 1.0, 1.0), real_s=0.6)
    run = framework_run({"a": one, "b": other}, 4, 1, {}, {})
    assert run.step_s == (1.5, 2.5)
    assert run.losses == (2.0, 1.5, 1.0)
    assert run.utilisation == {"a": 0.75, "b": 0.5}
    assert run.real_compute_ratio == pytest.approx(0.2)


def test_no_plan_passes_the_bounds(profile, planned):
    """What the simulator has every plan do on the laptop cluster lies under the bounds of its sort."""
    bounds = bounds_of(profile, 48, planned.plan)
    assert planned.samples_per_s_predicted <= bounds.chosen_plan * (1 + 1e-9)
    assert planned.samples_per_s_predicted <= bounds.compute
    assert planned.best_single_site.samples_per_s <= bounds.compute_best_site
    assert len(bound_lines(bounds)) == 6
    single = described_profile(load_preset("asteroid-b"), resolve_model("gpt2-tiny"))
    assert len(bound_lines(bounds_of(single, 40, None))) == 2, "nothing crosses sites where there is one"


def test_bytes_of_an_interface_are_read():
    text = "Inter-|\n    lo: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n  eth0:9 1 0 0 0 0 0 0 123 2 0 0 0 0 0 0\n"
    assert (sent_bytes(text, "eth0"), sent_bytes(text, "eth1")) == (123, 0)
