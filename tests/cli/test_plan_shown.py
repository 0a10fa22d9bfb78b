"""What a person sees of a plan: nothing is cut in a narrow terminal, and what has no room is named."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from spantrain.app.profiling.describe import described_profile
from spantrain.cli.render.plan import picture_lines, print_plan
from spantrain.config.cluster_file import load_preset
from spantrain.core.outer.groups import OuterGroup
from spantrain.core.planned.report import PlanReport
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec

COLUMNS = ("strategy", "samples/s", "s/step", "estimate", "bubble", "memory", "USD/step", "J/sample", "devices", "fits")


@pytest.fixture(scope="module")
def outcome():
    profile = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    options = PlanOptions(strategies=("ddp", "fsdp", "gpipe", "single-device"))
    return make_plan(profile, JobSpec(global_batch=32), options)


def shown(outcome, width, *, terminal=True):
    page = io.StringIO()
    print_plan(outcome, Console(width=width, file=page, force_terminal=terminal, color_system=None))
    return page.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 150])
def test_no_cell_is_cut_and_columns_left_out_are_named(outcome, width):
    lines = shown(outcome, width)
    table = [line for line in lines if line.startswith(("│", "┌", "├", "└"))]
    assert max(len(line) for line in table) <= width
    assert not [line for line in table if "…" in line]
    said = " ".join(" ".join(lines).split()).partition("Not shown in")[2].partition("(--json has all)")[0]
    for name in COLUMNS:
        assert any(name in line for line in table) != (name in said)
    assert sum(f"✓ {outcome.chosen}" in line for line in table) == 1
    for name in outcome.strategies:
        assert sum(f" {name} " in line for line in table) == 1


def test_all_columns_are_there_where_there_is_room(outcome):
    lines = shown(outcome, 150)
    assert not [line for line in lines if "Not shown" in line]
    assert all(any(name in line for line in lines) for name in COLUMNS)


def test_a_reason_wraps_under_itself_in_a_terminal_and_not_in_a_file(outcome):
    long = replace(outcome, report=PlanReport(reasons=(" ".join(["word"] * 60),)))
    words = [line for line in shown(long, 80) if "word word" in line]
    assert words[0].startswith("  · word")
    assert all(line.startswith("    word") for line in words[1:])
    assert len(words) > 3
    whole = [line for line in shown(long, 80, terminal=False) if "word word" in line]
    assert whole == [f"  · {long.report.reasons[0]}"]


def test_a_part_of_a_site_is_named_with_its_devices(outcome):
    first, *others = outcome.outer.groups
    part = OuterGroup(
        name="lab#2", devices=first.devices, global_batch=first.global_batch, step_s=first.step_s, stages=first.stages
    )
    found = replace(outcome, outer=replace(outcome.outer, groups=(part, *others)))
    assert any(f"lab#2 ({', '.join(first.devices)}): " in line for line in shown(found, 150, terminal=False))


def test_many_links_alike_are_one_line(outcome):
    load = next(iter(outcome.links.values()))
    (stage,) = (stage for stage in outcome.plan.stages[:1])
    names = [f"lab/h{n}->lab/h{n + 1}" for n in range(4)]
    cluster = outcome.plan.cluster
    hosts = {name: f"h{number}" for number, name in enumerate(device.name for device in cluster.devices[:5])}
    devices = tuple(
        replace(device, site="lab", host=hosts[device.name]) if device.name in hosts else device
        for device in cluster.devices
    )
    replicas = tuple(replace(stage.replicas[0], devices=(name,), sample_share=1.0) for name in hosts)
    one = replace(stage, replicas=replicas, end_unit=outcome.plan.stages[-1].end_unit)
    plan = replace(outcome.plan, cluster=replace(cluster, devices=devices), stages=(one,), hints=None)
    sizes = dict.fromkeys(hosts, 1)
    lines = picture_lines(replace(outcome, plan=plan, peak_bytes=sizes, links=dict.fromkeys(names, load)))
    (told,) = [line for line in lines if "gradient sum" in line]
    assert "4 links, each like h0->h1: " in told
