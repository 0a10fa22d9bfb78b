"""`spantrain outer demo`."""

from pathlib import Path
from typing import Annotated

import typer

from spantrain.cli.failure import clean_interrupt
from spantrain.cli.options import Json, NoNetwork, Out, print_json
from spantrain.config.files.json_codec import render_json, to_json
from spantrain.config.files.text_files import check_can_make, write_atomically


def demo(
    out: Out = Path("runs/outer-demo"),
    seconds: Annotated[float, typer.Option(help="Of training.", min=5, max=3600)] = 120.0,
    inner_steps: Annotated[int, typer.Option(help="Of a cluster between two pushes.", min=1, max=10_000)] = 16,
    json_: Json = False,
    no_network: NoNetwork = False,
) -> None:
    """Train one language model at four unequal places on shaped links, none of which waits for another."""
    from spantrain_studies.outer_demo.demo import run_outer_demo
    from spantrain_studies.outer_demo.orders import OuterDemoOptions
    from spantrain_studies.outer_demo.show import DemoScreen, show_demo

    check_can_make(out, "--out", files=("summary.json",), folders=("logs",))
    options = OuterDemoOptions(seconds=seconds, inner_steps=inner_steps, network=not no_network)
    with clean_interrupt("the demonstration"), DemoScreen() as screen:
        summary = run_outer_demo(options, out, screen)
    document = to_json(summary)
    show_demo(summary, stderr=json_)
    if json_:
        print_json(document)
    write_atomically(out / "summary.json", render_json(document) + "\n")
