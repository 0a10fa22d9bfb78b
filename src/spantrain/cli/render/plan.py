"""A plan for people: what runs where as a picture in text, why, and all strategies in one table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Column, Table

from spantrain.cli.render.text import console_for_people, say, short_way
from spantrain.core.names import few
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds, format_speed
from spantrain.cost.analytic import ANALYTIC_METHOD
from spantrain.formats.registry import WireFormat

if TYPE_CHECKING:
    from spantrain.core.outer.groups import OuterPlan
    from spantrain.core.profile import Profile
    from spantrain.planner.engine.outcome import PlanOutcome, StrategyFigures

_PLAIN_WIDTH = 150
_ENDS_SHOWN = 3
"""So many replicas from each end are named where there are many."""
_REASON_LENGTH = 160
_NAME = "strategy"
_GAP = 3
"""Characters between two columns: a space, a line, a space."""
_LEFT_OUT_FIRST = ("search s", "own estimate", "J/sample", "USD/step", "bubble", "memory")
"""Columns that give way, in this order, where the terminal is too narrow for all."""
_HEADS = {"own estimate": "own\nestimate"}


def show_plan(outcome: "PlanOutcome", profile: "Profile") -> None:
    """Print on standard output, with a word on where the figures come from."""
    console = console_for_people(_PLAIN_WIDTH)
    print_plan(outcome, console)
    if profile.provenance.method == ANALYTIC_METHOD:
        say(console, f"By data sheets: {ANALYTIC_METHOD}.")


def print_plan(outcome: "PlanOutcome", console: Console) -> None:
    """Print the strategies (the fastest first, the outer optimizer last), the chosen plan, and why."""
    ranked = sorted(outcome.strategies.items(), key=lambda entry: entry[1].step_s or float("inf"))
    cells = {name: _cells(figures) for name, figures in ranked}
    if outcome.outer is not None:
        cells["outer"] = _outer_cells(outcome.outer)
    rows = [{_NAME: f"{'✓' if name == outcome.chosen else ' '} {name}", **row} for name, row in cells.items()]
    columns = _columns(rows, console.width)
    heads = [
        Column(_HEADS.get(name, name), justify="left" if name == _NAME else "right", no_wrap=True) for name in columns
    ]
    plan = outcome.plan
    title = f"{plan.model.name}, global batch {plan.global_batch}, on {plan.cluster.name}: simulated"
    table = Table(*heads, title=title, box=box.SQUARE)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    console.print(table)
    left_out = [name for name in rows[0] if name not in columns]
    if left_out:
        say(console, f"Not shown in {console.width} characters: {', '.join(left_out)} (--json has all)")
    for line in (*_reason_lines(outcome), *_outer_lines(outcome.outer)):
        say(console, line)
    for line in picture_lines(outcome):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for reason in outcome.report.reasons:
        say(console, reason, mark="·")


def _columns(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Return the columns that a terminal of so many characters has room for."""
    wide = {
        name: max(
            len(part) for text in (_HEADS.get(name, name), *(row[name] for row in rows)) for part in text.split("\n")
        )
        for name in rows[0]
    }
    for name in _LEFT_OUT_FIRST:
        if sum(wide.values()) + _GAP * len(wide) + 1 <= width:
            break
        del wide[name]
    return list(wide)


def _cells(figures: "StrategyFigures") -> Mapping[str, str]:
    own, money, known = figures.own_estimate_s, figures.money_per_step, figures.step_s is not None
    joules = figures.joules_per_sample or 0.0
    cells = {
        "samples/s": format_speed(figures.samples_per_s or 0.0),
        "s/step": f"{figures.step_s or 0.0:.4g}",
        "own estimate": "-" if own is None else f"{own:.4g}",
        "bubble": f"{figures.bubble_ratio or 0.0:.0%}",
        "memory": f"{figures.peak_memory_share or 0.0:.0%}",
        "USD/step": "no price" if money is None else f"{money:.3g}",
        "J/sample": f"{joules:.3g}" if joules < 1000 else f"{joules:,.0f}",
        "devices": str(figures.devices_used),
    }
    fits = "no" if not known else "but" if figures.reason else "compare" if figures.only_to_compare else "yes"
    shown = cells if known else dict.fromkeys(cells, "-")
    return {**shown, "search s": f"{figures.search_s:.2f}", "fits": fits}


def _outer_cells(outer: "OuterPlan") -> Mapping[str, str]:
    """Return what is known of it: seconds are those in which it does a global batch."""
    none = dict.fromkeys(("own estimate", "bubble", "memory", "USD/step", "J/sample"), "-")
    return {
        "samples/s": format_speed(outer.samples_per_s),
        "s/step": f"{outer.global_batch / outer.samples_per_s:.4g}",
        **none,
        "devices": str(sum(len(group.devices) for group in outer.groups)),
        "search s": "-",
        "fits": "yes" if not outer.reason else "but" if outer.allowed else "ask",
    }


def _reason_lines(outcome: "PlanOutcome") -> Iterator[str]:
    """Say of each strategy that may not be chosen why not."""
    for name, figures in outcome.strategies.items():
        reason = figures.reason
        if reason:
            verb = "breaks a constraint" if figures.fits else "has no plan"
            yield f"{name} {verb}: {reason[:_REASON_LENGTH]}{'…' if len(reason) > _REASON_LENGTH else ''}"
        elif figures.only_to_compare:
            yield f"{name} is to compare: {figures.only_to_compare}"


def _outer_lines(outer: "OuterPlan | None") -> Iterator[str]:
    """Say what a round of the outer optimizer is, if there is one."""
    if outer is None:
        return
    groups = "; ".join(
        f"{group.name}{f' ({few(group.devices)})' if '#' in group.name else ''}: {group.global_batch} samples in "
        f"{format_seconds(group.step_s)}"  # of a part of a site (`lab#2`) with its devices
        for group in outer.groups
    )
    yield (
        f"outer: {outer.inner_steps} inner steps ({groups}), then {format_seconds(outer.exchange_s)} of exchange "
        f"through {outer.server}: {format_speed(outer.samples_per_s)} samples/s. How much each sample teaches so is "
        "not reckoned."
    )
    if outer.reason:
        yield f"outer may not be chosen: {outer.reason}"


def picture_lines(outcome: "PlanOutcome") -> list[str]:
    """Return the plan as text: stages from first to last, and between them the links with their load.

    Links inside a stage (its gradient sum) stand under it. Both directions stand together where they carry the same.
    """
    plan = outcome.plan
    lines = [f"Plan of {outcome.chosen}, {plan.schedule} order"]
    shown: set[str] = set()
    for index, stage in enumerate(plan.stages):
        sizes = sorted({span.size for span in stage.micro_batches})
        units = f"units {stage.first_unit}-{stage.end_unit - 1}" if len(stage.units) > 1 else f"unit {stage.first_unit}"
        batch = f"micro-batches of {'/'.join(map(str, sizes))}"
        again = f", {len(stage.recompute)} units computed again" if stage.recompute else ""
        sliced = ", slices of the sequence" if stage.sequence_parallel else ""
        what = stage.state_sharding.divided
        divided = f", {what} divided among replicas ({stage.state_sharding.value})" if what else ""
        if stage.offloads:
            divided = ", state in its host's memory (offload)"
        lines.append(f"  ┌ stage {index}: {units}, {batch}{divided}{sliced}{again}")
        lines += [f"  │   {text}" for text in _replica_texts(stage, outcome)]
        lines += [f"  │   gradient sum over {text}" for text in _links(outcome, stage, stage, shown)]
        if index + 1 < len(plan.stages):
            both = _links(outcome, stage, plan.stages[index + 1], shown)
            sent = [] if stage.wire_format is WireFormat.NATIVE else [f"sent as {stage.wire_format.value}"]
            lines += [f"  ↕ {text}" for text in (*both, *sent)]
    rest = [name for name in outcome.links if name not in shown]
    return lines + [f"  also {text}" for text in _link_texts(rest, outcome)]


def _replica_texts(stage: Stage, outcome: "PlanOutcome") -> list[str]:
    total = sum(replica.sample_share for replica in stage.replicas)
    own = outcome.plan.cluster.device_by_name
    texts = []
    for replica in stage.replicas:
        first = own[replica.devices[0]]
        memory = max(outcome.peak_bytes[name] / own[name].memory_bytes for name in replica.devices)
        share = _percent(replica.sample_share / total)
        texts.append(
            f"{_group_text(replica)} ({first.kind}, {first.site}): {share} of the samples, "
            f"{replica.in_flight_limit} in flight, memory {memory:.0%}"
        )
    if len(texts) > 2 * _ENDS_SHOWN + 1:
        hidden = len(texts) - 2 * _ENDS_SHOWN
        texts = [*texts[:_ENDS_SHOWN], f"… {hidden} more …", *texts[-_ENDS_SHOWN:]]
    return texts


def _group_text(replica: Replica) -> str:
    """Return the devices of a replica; of a tensor-parallel group each with its part."""
    if len(replica.devices) == 1:
        return replica.devices[0]
    total = sum(replica.tp_shares)
    parts = zip(replica.devices, replica.tp_shares, strict=True)
    return "+".join(f"{name} {_percent(share / total)}" for name, share in parts) + " of each tensor"


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{100 * part:.2g}%"


def _links(outcome: "PlanOutcome", a: Stage, b: Stage, shown: set[str]) -> list[str]:
    """Return the links that join two stages (or one with itself) and that are not shown yet; mark them."""
    here, there = _places(outcome.plan, a), _places(outcome.plan, b)
    found = []
    for name in outcome.links:
        source, is_link, target = name.partition("->")
        joins = (source in here and target in there) or (source in there and target in here)
        if is_link and joins and name not in shown:
            found.append(name)
    shown.update(found)
    if len(found) > _ENDS_SHOWN and len({outcome.links[name] for name in found}) == 1:
        return [f"{len(found)} links, each like {_link_text(found[0], outcome)}"]
    if len(found) > 2 * _ENDS_SHOWN:
        busiest = max(found, key=lambda name: outcome.links[name].busy_ratio)
        return [f"{len(found)} links, the busiest {_link_text(busiest, outcome)}"]
    return _link_texts(found, outcome)


def _places(plan: Plan, stage: Stage) -> frozenset[str]:
    """Return the ends of links at which a stage's devices are (as `cost.network` names them): sites, hosts, devices."""
    devices = [plan.cluster.device_by_name[name] for name in stage.devices]
    ways = [(device.site, device.host, device.name) for device in devices]
    return frozenset("/".join(way[:depth]) for way in ways for depth in (1, 2, 3))


def _link_texts(names: Sequence[str], outcome: "PlanOutcome") -> list[str]:
    """Return a line for each link; two directions with the same load share one."""
    texts: list[str] = []
    done: set[str] = set()
    for name in names:
        back, text = "->".join(reversed(name.split("->"))), _link_text(name, outcome)
        if name in done:
            continue
        if back != name and back in names and outcome.links[back] == outcome.links[name]:
            done.add(back)
            text = text.replace("->", "<->", 1).replace(" a step,", " a step each way,")
        texts.append(text)
    return texts


def _link_text(name: str, outcome: "PlanOutcome") -> str:
    load = outcome.links[name]
    return (
        f"{short_way(name)}: {format_bytes(load.size_bytes)} a step, {load.busy_ratio:.0%} of "
        f"{format_bandwidth(load.bandwidth_bytes_per_s)} ({format_seconds(load.busy_ratio * outcome.step_s_predicted)})"
    )
