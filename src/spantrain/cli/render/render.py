"""What a person sees: live progress on standard error, tables on standard output."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from spantrain.app.reporter import DrawingReporter
from spantrain.cli.render.plan import print_plan
from spantrain.cli.render.text import console_for_people
from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport
from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds
from spantrain.planner.groups import DeviceGroup, tree_lines

if TYPE_CHECKING:
    from spantrain.app.demo import DemoSummary
    from spantrain.app.training.outcome import TrainOutcome
    from spantrain.planner.engine.outcome import PlanOutcome
    from spantrain.runtime.coordinator.barrier import StepOutcome

_LOG_EVERY_STEPS = 10
"""Where there is no terminal, a line for every so many steps."""


class TerminalReporter(DrawingReporter):
    """Draws progress in place on a terminal, prints plain lines elsewhere; tables go to standard output if wanted."""

    def __init__(self, *, tables: bool) -> None:
        super().__init__(console_for_people(stderr=True), every=_LOG_EVERY_STEPS)
        self._output = console_for_people(stderr=not tables)
        self._plan: Plan | None = None

    def phase(self, text: str) -> None:
        """Begin a new line of progress."""
        self._recent_s.clear()
        self._console.print(Text(text, style="bold"))

    def show_groups(self, groups: Sequence[DeviceGroup], profile: Profile) -> None:
        """Print the two levels of groups."""
        self._output.print(Text("Groups (by network; within, by compute and memory)", style="bold"))
        for line in tree_lines(groups, profile):
            self._output.print(f"  {line}", highlight=False, markup=False)

    def show_profile(self, profile: Profile) -> None:
        """Print what was measured."""
        scores = Table("device", "site", "kind", "memory", "capacity score", title="Devices")
        for device in profile.cluster.devices:
            score = profile.score_by_device.get(device.name)
            shown = "-" if score is None else f"{score:.4g}"
            scores.add_row(device.name, device.site, device.kind, format_bytes(device.memory_bytes), shown)
        self._output.print(scores)
        network = Table("from", "to", "bandwidth", "latency", title="Network (median over pairs of devices)")
        site_of = {device.name: device.site for device in profile.cluster.devices}
        by_sites: defaultdict[tuple[str, str], list[LinkMeasurement]] = defaultdict(list)
        for link in profile.links:
            by_sites[site_of[link.source], site_of[link.target]].append(link)
        for sites, links in sorted(by_sites.items()):
            bandwidth = format_bandwidth(statistics.median(link.bandwidth_bytes_per_s for link in links))
            network.add_row(*sites, bandwidth, format_seconds(statistics.median(link.latency_s for link in links)))
        self._output.print(network)
        provenance = profile.provenance
        self._output.print(
            f"  compute in {provenance.compute_s:.1f} s, one round of the network in {provenance.network_s:.1f} s; "
            f"{provenance.method}",
            style="dim",
            highlight=False,
        )

    def show_plan(self, outcome: "PlanOutcome") -> None:
        """Print the plan, what it is better than, and why."""
        print_plan(outcome, self._output)

    def show_training(self, outcome: "TrainOutcome", plan: Plan, report: PlanReport) -> None:
        """Print the figures of a run."""
        self.close()
        first, last = ("no number" if one is None else f"{one:.4f}" for one in (outcome.losses[0], outcome.losses[-1]))
        title = f"{outcome.steps} steps, {outcome.schedule}: loss {first} → {last}"
        run = Table("", "predicted", "measured", "difference", title=title)
        step_s = format_seconds(outcome.step_s_predicted), format_seconds(outcome.step_s_measured)
        run.add_row("step", *step_s, f"{outcome.prediction_error_ratio:+.1%}")
        predicted = plan.global_batch / outcome.step_s_predicted
        run.add_row("throughput", f"{predicted:.1f} samples/s", f"{outcome.samples_per_s:.1f} samples/s", "")
        for other in report.alternatives:
            if other.samples_per_s is not None:
                run.add_row(f"{other.name} would", f"{other.samples_per_s:.1f} samples/s", "", "")
        self._output.print(run)
        self._output.print(_device_table(outcome))
        if outcome.links:
            links = Table("link", "sent", "received", "mean", title="Links")
            for name, one in outcome.links.items():
                sizes = format_bytes(one.bytes_sent), format_bytes(one.bytes_received)
                links.add_row(name, *sizes, format_bandwidth(one.mean_bytes_per_s))
            self._output.print(links)
        if any(len({plan.cluster.device_by_name[name].site for name in stage.devices}) > 1 for stage in plan.stages):
            self._output.print(
                "  gradient sums between sites go by torch.distributed, which does not count bytes", style="dim"
            )
        self._output.print(f"  {outcome.emulated}", style="dim", highlight=False)
        if outcome.trace:
            self._output.print(f"  trace: {outcome.trace} (open it at ui.perfetto.dev)", highlight=False)

    def run_begins(self, plan: Plan, reason: str = "") -> None:  # noqa: ARG002
        """Remember the plan, to say stages and sites."""
        self._plan = plan

    def more_lines(self, outcome: "StepOutcome") -> list[str]:
        """Return where devices waited, and what crossed each directed pair of sites, over the whole step."""
        plan = self._plan
        if plan is None:
            return []
        busy = [statistics.fmean(outcome.busy_s[name] for name in stage.devices) for stage in plan.stages]
        waits = (max(0.0, 1.0 - busy_s / outcome.duration_s) for busy_s in busy)
        bubbles = "  ".join(f"stage {index}: {part:.0%}" for index, part in enumerate(waits))
        moved: Counter[tuple[str, str]] = Counter()
        own = plan.cluster.device_by_name
        for source, sent in outcome.sent_bytes.items():
            for target, size in sent.items():
                if own[source].site != own[target].site:
                    moved[own[source].site, own[target].site] += size
        mbit = {pair: size * 8e-6 / outcome.duration_s for pair, size in sorted(moved.items()) if size}
        rates = "  ".join(f"{a}→{b} {rate:.1f} Mbit/s" for (a, b), rate in mbit.items())
        return [f"  bubble  {bubbles}", f"  between sites  {rates or 'no activations'}"]


def show_demo_summary(summary: "DemoSummary", *, stderr: bool) -> None:
    """Print the demonstration's last lines."""
    table = Table(title="In short", show_header=False)
    table.add_row("held-out loss", " → ".join(f"{summary.heldout_losses[at].loss:.3f}" for at in (0, -1)))
    table.add_row("this plan, all sites", f"{summary.samples_per_s:.1f} samples/s (measured)")
    alone, devices = summary.best_single_site_samples_per_s, ", ".join(summary.best_single_site_devices)
    table.add_row("best single site", f"{alone:.1f} samples/s (measured: {devices})")
    table.add_row("speed-up", f"{summary.speedup_over_single_site:.2f} ×")
    times = f"{summary.step_s_measured:.3f} s measured, {summary.step_s_predicted:.3f} s predicted"
    table.add_row("step time", f"{times} ({summary.prediction_error_ratio:+.1%})")
    console_for_people(stderr=stderr).print(table)


def _device_table(outcome: "TrainOutcome") -> Table:
    """Return the figures of devices; what part of tensors each has, where any are divided."""
    divided = any(figures.tensor_share < 1.0 for figures in outcome.devices.values())
    shares = ("samples", "tensors") if divided else ("samples",)
    figures_of = ("busy predicted", "busy measured", "bubble", "MFU", "real compute")
    metered = any(figures.power_w is not None for figures in outcome.devices.values())
    table = Table(
        "device", "kind", "stage", *shares, *figures_of, *(("power", "energy") if metered else ()), title="Devices"
    )
    for name, figures in outcome.devices.items():
        parts = (
            figures.sample_share, *([figures.tensor_share] if divided else []), figures.utilisation_predicted,
            figures.utilisation, figures.bubble_ratio, figures.flop_ratio, figures.real_compute_ratio,
        )  # fmt: skip
        told = ((figures.power_w, "W"), (figures.energy_j, "J")) if metered else ()
        meters = ("–" if value is None else f"{value:,.0f} {unit}" for value, unit in told)
        stages = ", ".join(map(str, figures.stages))
        table.add_row(name, figures.kind, stages, *(f"{part:.0%}" for part in parts), *meters)
    return table
