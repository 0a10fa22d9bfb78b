"""A comparison as tables: a row for each method, the bytes on each link, the bounds beside."""

from rich.table import Column, Table

from spantrain.app.profiling.slowing import SOUND_REAL_COMPUTE
from spantrain.cli.render.render import TerminalReporter
from spantrain.cli.render.text import console_for_people, say
from spantrain.core.quantities import format_bytes, format_seconds, format_speed
from spantrain_studies.comparison.compare import CompareListener
from spantrain_studies.comparison.figures import CompareOutcome, ComparisonBounds, MethodFigures, Scale

_PLAIN_WIDTH = 140
_MARK = "*"


class CompareReporter(TerminalReporter, CompareListener):
    """Also tells of the scale and of each method as it ends."""

    part: CompareOutcome | None = None
    """What was measured of a comparison that was ended early."""

    def __enter__(self) -> "CompareReporter":
        super().__enter__()
        return self

    def ends_early(self, outcome: CompareOutcome) -> None:
        """Keep what was measured."""
        self.part = outcome

    def show_scale(self, scale: Scale) -> None:
        """Say what of the setting is not life-size."""
        self.note(f"Scale: {scale.text}")

    def show_method(self, name: str, figures: MethodFigures) -> None:
        """Say a method's speed."""
        part = figures.real_compute_ratio
        real = "" if part is None else f", real compute {part:.0%} of emulated time"
        self.note(f"  {name}: {format_speed(figures.samples_per_s)} samples/s, loss {figures.loss_last:.4f}{real}")


def show_comparison(outcome: CompareOutcome) -> None:
    """Print all of it."""
    console = console_for_people(_PLAIN_WIDTH)
    setting = outcome.setting
    say(console, f"{setting.model} on {setting.cluster}, {setting.global_batch} samples a step; {setting.scale.text}")
    console.print(method_table(outcome))
    if not outcome.is_complete:
        say(console, "ended early: methods and rounds that it had not come to are left out", mark=_MARK)
    if any(not row.sound for row in outcome.methods.values()):
        say(
            console,
            f"real computation took over {SOUND_REAL_COMPUTE:.0%} of the emulated time: the figure is partly this "
            "machine's; a smaller --emulated-speed mends it",
            mark=_MARK,
        )
    if outcome.rounding_error is not None:
        say(
            console,
            f"one process that cuts its batch otherwise is off by {outcome.rounding_error:.0e} itself: rounding, "
            f"which {setting.steps} steps of training have enlarged",
        )
    if any(row.bytes or row.host_bytes for row in outcome.methods.values()):
        console.print(traffic_table(outcome))
    for line in bound_lines(outcome.bounds):
        say(console, line)
    for name, reason in outcome.refused.items():
        say(console, f"{name} does not run here: {reason}")
    say(console, outcome.emulated)


def method_table(outcome: CompareOutcome) -> Table:
    """Return the rows; on real devices nothing is said of emulated time."""
    samples = outcome.setting.global_batch * outcome.setting.steps
    emulated = any(row.real_compute_ratio is not None for row in outcome.methods.values())
    right = (
        "samples/s",
        "ratio",
        "busy",
        "peak",
        f"loss after {samples}",
        "off by",
        *(("real compute",) if emulated else ()),
        "step predicted",
    )
    table = Table(Column("method", no_wrap=True), *(Column(name, justify="right") for name in right), "how")
    for name, row in outcome.methods.items():
        table.add_row(
            name,
            format_speed(row.samples_per_s),
            f"{row.ratio_to_first:.2f}",
            f"{row.utilisation:.0%}",
            format_bytes(row.peak_bytes),
            _loss(row, outcome),
            f"{row.loss_error:.0e}",
            *((_real_compute(row),) if emulated else ()),
            "" if row.step_s_predicted is None else _predicted(row, outcome.setting.global_batch),
            row.what,
        )
    return table


def traffic_table(outcome: CompareOutcome) -> Table:
    """Return what a step sends: over each link between sites, or out of each host where there is one site."""
    rows = {name: row.bytes or row.host_bytes for name, row in outcome.methods.items()}
    ways = list(dict.fromkeys(way for row in rows.values() for way in row))
    title = "Sent in a step" if any(row.bytes for row in outcome.methods.values()) else "Sent in a step, by host"
    table = Table(Column("method", no_wrap=True), *(Column(way, justify="right") for way in ways), title=title)
    for name, row in rows.items():
        table.add_row(name, *(format_bytes(round(row[way])) if way in row else "" for way in ways))
    return table


def bound_lines(bounds: ComparisonBounds) -> list[str]:
    """Return what no method can pass, a line for each bound that there is."""
    lines = {
        "any method, all devices computing all the time": bounds.compute,
        "any method inside the best site": bounds.compute_best_site,
        "gradient sums over all sites, by their links": bounds.link_data_parallel,
        "every sample through all sites, by their links": bounds.link_pipeline,
        "any method over all sites, by latency": bounds.latency,
        "auto's plan in any order": bounds.chosen_plan,
    }
    return [f"at most {format_speed(value)} samples/s: {what}" for what, value in lines.items() if value is not None]


def _loss(row: MethodFigures, outcome: CompareOutcome) -> str:
    fewer = row.steps < outcome.setting.steps
    return f"{row.loss_last:.4f}" + (f" (after {row.steps * outcome.setting.global_batch})" if fewer else "")


def _real_compute(row: MethodFigures) -> str:
    return "" if row.real_compute_ratio is None else f"{row.real_compute_ratio:.0%}{'' if row.sound else _MARK}"


def _predicted(row: MethodFigures, global_batch: int) -> str:
    assert row.step_s_predicted is not None
    error = global_batch / row.samples_per_s / row.step_s_predicted - 1.0
    return f"{format_seconds(row.step_s_predicted)} ({error:+.1%})"
