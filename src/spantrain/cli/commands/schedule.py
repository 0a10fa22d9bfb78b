"""`spantrain schedule`: look at an order of work before anything is trained with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spantrain.cli.options import Json, print_json
from spantrain.config.files.text_files import check_can_write, write_atomically
from spantrain.errors import ConfigError
from spantrain.schedule.registry import check_schedule, own_schedules, schedule_named

if TYPE_CHECKING:
    from spantrain.app.simulation.schedule import ShownSchedule

app = typer.Typer(
    name="schedule",
    help="Look at an order of work: timeline, time over the lower bound, bubbles, samples held.",
    no_args_is_help=True,
)

_WIDEST = 160
"""Cells of a timeline that keeps whole cells for whole actions; longer ones are pressed together."""


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(own_schedules())}, or a package's.")],
    stages: Annotated[int | None, typer.Option(help="Equal devices; F, I, W take 1 s each.", min=1, max=128)] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages of each device: an interleaved pipeline.", min=1)] = None,
    back: Annotated[bool, typer.Option("--back", help="The second chunks go back to the first device.")] = False,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches of a step.", min=1, max=1024)] = None,
    transfer: Annotated[float | None, typer.Option(help="Seconds that a micro-batch keeps a link busy.")] = None,
    latency: Annotated[float | None, typer.Option(help="Seconds from one stage to the next, besides.")] = None,
    in_flight: Annotated[int | None, typer.Option(help="Micro-batches that a stage may hold; default: all.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan: its stages, limits and profile instead.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="The same as PNG; needs `pip install 'spantrain[plot]'`.")] = None,
    order: Annotated[Path | None, typer.Option(help="Write every replica's order, as text, to this file.")] = None,
    json_: Json = False,
) -> None:
    """Run a schedule in the simulator and show what every device does when."""
    check_schedule(name)
    for option, path in (("--svg", svg), ("--png", png), ("--order", order)):
        if path is not None:
            check_can_write(path, option)
    if png is not None:
        from spantrain.app.picture import check_png

        check_png()
    even = {"stages": stages, "micro_batches": micro_batches, "transfer_s": transfer, "latency_s": latency}
    shown = _run(name, plan, even | {"in_flight": in_flight, "chunks": chunks, "back": back or None})
    if svg is not None or png is not None:
        _draw(shown, svg, png)
    if order is not None:
        from spantrain.schedule.render.text import format_orders

        write_atomically(order, f"# {shown.schedule}: {_headline(shown)}\n{format_orders(shown.orders)}\n")
    if json_:
        figures = (
            "schedule",
            "step_s",
            "pipeline_s",
            "lower_bound_s",
            "ratio_to_bound",
            "bubble_ratio",
            "peak_samples",
        )
        orders = [[[str(action) for action in order] for order in row] for row in shown.orders]
        print_json({name: getattr(shown, name) for name in figures} | {"orders": orders})
    else:
        _print(shown, None if plan is not None else (transfer or 0.0, latency or 0.0))


@app.command()
def check(
    order: Annotated[Path, typer.Argument(help="An order as text: a line per replica.")],
    plan: Annotated[Path | None, typer.Option(help="The plan whose micro-batches and limits it must keep.")] = None,
) -> None:
    """Check that an order does all work once, within memory, and can run; the action that fails is named."""
    from spantrain.app.simulation.schedule import check_order_file

    orders = check_order_file(order, plan)
    typer.echo(f"{order}: {sum(len(own) for row in orders for own in row)} actions of {len(orders)} stages can run")


def _run(name: str, plan: Path | None, even: dict[str, Any]) -> "ShownSchedule":
    """Run a schedule on a plan, or on even stages: the fields of `EvenPipeline`, None for what was not given."""
    from spantrain.app.simulation.schedule import EvenPipeline, show_even, show_plan

    words = {field: f"--{field.removesuffix('_s').replace('_', '-')}" for field in even}
    given = {field: value for field, value in even.items() if value is not None}
    if plan is not None:
        if given:
            said = ", ".join(words[field] for field in given)
            raise ConfigError(f"{said}: the plan says that; leave them out, or leave out --plan")
        return show_plan(name, plan)
    missing = [words[field] for field in ("stages", "micro_batches") if field not in given]
    if missing:
        raise ConfigError(f"give {' and '.join(missing)}, e.g. --stages 4 --micro-batches 6, or --plan plan.json")
    return show_even(name, EvenPipeline(**given))


def _draw(shown: "ShownSchedule", svg: Path | None, png: Path | None) -> None:
    from spantrain.app.picture import write_png
    from spantrain.schedule.render.svg import draw_trace

    picture = draw_trace(shown.trace, title=f"{shown.schedule}: {_headline(shown)}")
    if svg is not None:
        write_atomically(svg, picture)
    if png is not None:
        write_png(picture, png)


def _headline(shown: "ShownSchedule") -> str:
    return (
        f"{shown.pipeline_s:g} s, {shown.ratio_to_bound:.3f} times the lower bound of {shown.lower_bound_s:g} s"
        if shown.step_s == shown.pipeline_s
        else f"{shown.step_s:.4g} s a step, of it {shown.pipeline_s:.4g} s in the pipeline, "
        f"{shown.ratio_to_bound:.3f} times the lower bound of {shown.lower_bound_s:.4g} s"
    )


def _print(shown: "ShownSchedule", even_s: tuple[float, float] | None) -> None:
    """Show a schedule, in cells of a second or an even part of it that these times are whole numbers of, if any."""
    from spantrain.schedule.render.text import render_trace

    parts = (1, 2, 4) if even_s else ()
    fitting = [count for count in parts if all((value * count).is_integer() for value in even_s or ())]
    cells = round(shown.pipeline_s * fitting[0]) if fitting else _WIDEST
    typer.echo(f"{shown.schedule} ({schedule_named(shown.schedule).description})")
    typer.echo(f"{_headline(shown)}\n")
    typer.echo(render_trace(shown.trace, width=max(1, min(cells, _WIDEST))))
    typer.echo("\nstage  bubble  most samples held")
    for stages, row, bubble in zip(shown.stages, shown.devices, shown.bubble_ratio, strict=True):
        held = ", ".join(f"{device} {shown.peak_samples[device]}" for device in row)
        typer.echo(f"{', '.join(map(str, stages)):<5}  {bubble:6.1%}  {held}")
