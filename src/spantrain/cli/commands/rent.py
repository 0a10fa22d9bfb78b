"""`spantrain plan --offers`: what to rent."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli import options as shared
from spantrain.cli.render.text import console_for_people, figures_table, say
from spantrain.config.files.text_files import check_can_write, write_atomically
from spantrain.config.prices import PriceFile, read_prices, shipped_prices
from spantrain.core.quantities import parse_seconds
from spantrain.core.records import Record
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from spantrain.app.renting.choice import RentGoal, RentOutcome
    from spantrain.cli.commands.plan import PlanArguments
    from spantrain.core.units import ModelSpec

_PLAIN_WIDTH = 150
_TODAY = "today"
_BATCH_TOKENS, _BATCH_SAMPLES = 2**19, 256
"""Of a global batch that nobody named: what GPT-2 and the small GPT-3 were trained with; a usual one of images."""
_GO_WITH = frozenset({
    "model", "global_batch", "dtype", "optimizer", "schedule", "min_throughput", "quota", "leave_out", "allow_wire",
    "tensor_parallel", "recompute", "recompute_all", "sequence_parallel", "out", "json_", "data",
    "tokenizer", "sequence_length", "lora", "dropout", "compile", "chat_template", "train_on", "packing",
})  # fmt: skip
"""Other options of `spantrain plan` that mean something here."""


class RentOptions(Record):
    """What is asked of offers."""

    prices: shared.PricesFile = None
    offers: Annotated[str | None, "What to rent? `today` (the shipped list), or a file of offers; with --model."] = None
    tokens: Annotated[float | None, "With --offers: how many are trained on, e.g. 1e9."] = None
    samples: Annotated[float | None, "The same of a model of images."] = None
    budget: Annotated[float | None, "With --offers: US dollars at most; the fastest is taken."] = None
    deadline: Annotated[str | None, "With --offers: e.g. '24 h' at most; the cheapest is taken."] = None
    usd_per_million: Annotated[
        float | None, "With --offers: US dollars at most, for a million tokens (of images: samples)."
    ] = None
    out_plot: Annotated[Path | None, "With --offers: hours against dollars, as FILE.svg or FILE.png."] = None


_ONLY_HERE = frozenset(one.name for one in fields(RentOptions)) - {"prices"}


def check_rent_options(asked: RentOptions, context: typer.Context) -> None:
    """Refuse options that mean nothing without --offers, or with it.

    Raises:
        ConfigError: it names them.
    """
    given = shared.given_options(context)
    if asked.offers is None:
        alone = [given[name] for name in given if name in _ONLY_HERE]
        if alone:
            raise ConfigError(f"{', '.join(alone)}: needs --offers today, or --offers FILE")
        return
    others = [given.get(name, name) for name in given if name not in _GO_WITH | _ONLY_HERE]
    if others:
        raise ConfigError(f"--offers {asked.offers}: does not go with {', '.join(others)}; leave that out")


def rent_command(asked: "PlanArguments") -> None:
    """Find what to rent, show it, and write the plan with its cluster file."""
    from spantrain.app.planning.plan_files import write_plans
    from spantrain.app.renting.picture import check_plot, write_plot
    from spantrain.app.renting.search import RentRequest, rent
    from spantrain.cli.render.render import TerminalReporter

    out, cluster_path = asked.out, None
    if out is not None:
        cluster_path = out.with_name(f"{out.stem}.cluster.yaml")
        for path in (out, cluster_path):
            check_can_write(path, "--out")
    if asked.out_plot is not None:
        check_plot(asked.out_plot)
    prices = _prices(asked)
    if asked.model is None:
        raise ConfigError("--offers needs --model NAME, e.g. --model gpt2-xl")
    dtype = asked.dtype or "bfloat16"
    shared.check_dtype(dtype)
    model = asked.chosen_model(asked.model)
    goal = _goal(asked, model)
    job = replace(asked.job(_batch(asked, model)), dtype=dtype)
    with TerminalReporter(tables=not asked.json_) as reporter:
        request = RentRequest(
            model=model, job=job, prices=prices, goal=goal, dtype=dtype, options=asked.options(),
            progress=reporter.progress,
        )  # fmt: skip
        reporter.phase(f"Planning for what is on offer ({asked.offers}): up to a minute")
        outcome = rent(request)
    if out is not None and cluster_path is not None:
        write_atomically(cluster_path, outcome.cluster_text.encode())
        write_plans(outcome.in_full, outcome.profile, None, out)
    if asked.out_plot is not None:
        write_plot(outcome, asked.out_plot)
    if asked.json_:
        shared.print_json(_document(outcome, job.global_batch))
    else:
        _show(outcome, job.global_batch)
    wrote = [str(path) for path in (out, cluster_path, asked.out_plot) if path is not None]
    typer.echo(f"Wrote {', '.join(wrote)}" if wrote else "Not written (--out FILE keeps the plan)", err=True)


def _prices(asked: RentOptions) -> PriceFile:
    if asked.offers == _TODAY:
        return shipped_prices()
    found = read_prices(Path(asked.offers or ""))
    if not found.table.offers:
        raise ConfigError(f"{asked.offers}: has no `offers`; docs/prices.md shows how to write them")
    return found


def _goal(asked: "PlanArguments", model: "ModelSpec") -> "RentGoal":
    from spantrain.app.renting.choice import RentGoal

    unit = "samples" if model.sequence_length is None else "tokens"
    wrong, right = ("tokens", "samples") if unit == "samples" else ("samples", "tokens")
    if getattr(asked, wrong) is not None:
        raise ConfigError(f"--{wrong}: {model.name} is trained on {right}; give --{right} N")
    deadline_s = shared.positive("--deadline", asked.deadline, parse_seconds)
    return RentGoal(
        unit=unit,
        per_sample=model.sequence_length or 1,
        amount=asked.samples if unit == "samples" else asked.tokens,
        budget_usd=asked.budget,
        deadline_h=None if deadline_s is None else deadline_s / 3600,
        min_samples_per_s=asked.min_throughput,
        usd_per_million=asked.usd_per_million,
    )


def _batch(asked: "PlanArguments", model: "ModelSpec") -> int:
    if asked.global_batch is not None:
        batch, *more = asked.batches()
        if more:
            raise ConfigError(f"--global-batch {asked.global_batch}: with --offers give one number of samples")
        return batch
    return _BATCH_SAMPLES if model.sequence_length is None else max(1, _BATCH_TOKENS // model.sequence_length)


def _document(outcome: "RentOutcome", global_batch: int) -> dict[str, object]:
    return {
        "model": outcome.chosen.plan.model.name,
        "global_batch": global_batch,
        "unit": outcome.goal.unit,
        "amount": outcome.goal.shown_amount,
        "chosen": outcome.chosen.document(),
        "one_node": outcome.one_node and outcome.one_node.document(),
        "frontier": [row.document() for row in outcome.frontier],
        "planned": outcome.planned,
        "looked_at": outcome.looked_at,
        "reasons": outcome.reasons(),
        "cluster": outcome.cluster_text,
    }


def _show(outcome: "RentOutcome", global_batch: int) -> None:
    """Print the frontier as a table, the choice, and its plan."""
    from spantrain.cli.render.plan import picture_lines

    console = console_for_people(_PLAIN_WIDTH)
    console.print(_table(outcome, global_batch))
    for line in outcome.reasons():
        say(console, line)
    for line in picture_lines(outcome.in_full):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(outcome: "RentOutcome", global_batch: int) -> "Table":
    """Return the frontier, the cheapest first; the choice is ticked, and the best single machine stands below."""
    from rich import box

    goal = outcome.goal
    title = (
        f"{outcome.chosen.plan.model.name}, global batch {global_batch}, {goal.shown_amount:.4g} {goal.unit}: what "
        "money buys in time"
    )
    heads = ("hours", "USD", "of it egress", f"USD/M {goal.unit}", "lost", "plan")
    table = figures_table("what to rent", *heads, title=title, box=box.SQUARE)
    shown = [row.candidate for row in outcome.frontier]
    more = [row for row in (outcome.chosen, outcome.one_node) if row is not None and row.candidate not in shown]
    for number, row in enumerate((*outcome.frontier, *more)):
        if number == len(shown):
            table.add_section()
        mark = "✓" if row.candidate == outcome.chosen.candidate else " "
        table.add_row(
            f"{mark} {row.candidate.what}",
            f"{row.hours:.3g}",
            f"{row.usd:,.4g}" if row.usd < 1000 else f"{row.usd:,.0f}",
            f"{row.egress_usd:.3g}" if row.egress_usd else "-",
            f"{row.usd_per_million:.3g}",
            f"{row.lost_ratio:.1%}" if row.lost_ratio else "-",
            row.how,
        )
    return table
