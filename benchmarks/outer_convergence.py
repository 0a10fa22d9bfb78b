"""Print what training over four clusters comes to, by method: `outer_convergence.py [--seeds N] [--keep DIR]`.

After Di-PS, 4.1 and figures 2, 7 and 12: a GPT of 1.07 million parameters on real text, four clusters, H = 64 and 16,
speeds with uniform gaps or one cluster 5.2 times as slow. Told is the held-out loss when all clusters together have
trained on as many tokens, by `dp`, `diloco` (synchronous; its result is the same for any speeds), `async-diloco`
(decentralized, naive; the mean over the clusters' copies) and `outer` (ours). Kept of the paper's recipe: AdamW inside,
with a warm-up. Not kept: its model's size, its learning rate of 6e-5, its 2.4 billion tokens, and clipping: `diloco`
has none, so `outer` has none.

Every method is tried with each of a few outer rates and momenta, the paper's 0.7 and 0.8 among them, with the first
seed; each goes on, for the same H, with those that were best for it. The table says which.

Then a cluster that sends what is no gradient, each time: noise as large as its gradients, noise of deviation 1, its
gradients a million times as large, no numbers. That is compared with training in which it is not there.

Real: parameters, gradients, losses, the guard, shards' sums and updates, the master's and the clients' decisions.
Simulated: time, in which an exchange takes six of the fastest cluster's steps each way, as in the paper's throughput
experiments. With the smaller H that is three quarters of a round; so ours is also trained with clusters that stand
still after a quarter of a round behind a push (`ahead: 0.25`), and it is told what part of the ideal throughput that
leaves. It takes an hour or two of one processor; with `--keep` what was trained is kept in a folder, and a run that was
ended goes on from there.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from outer_gpt import Recipe
from outer_training import SPEEDS, Run, Trained, kept_of, train_or_read
from results import line_plot, save
from spantrain.outer.rules.nesterov import Nesterov
from worker_pool import workers

MAIN = ("0-50 %", "5.2 times")
"""Speeds that are tried with all seeds."""
AWAY = "away"
SPOILS = (AWAY, "noise", "huge", "nan", "loud noise")
"""Away: that cluster is not there, for comparison."""
WITHIN, CHANGED = 0.01, 0.01
INNER_STEPS = (64, 16)
AHEAD = 0.25
"""Of a round, behind a push, where clusters then stand still."""
OURS, BOUNDED = "outer", f"outer {AHEAD:g}"
RULES = "0.7/0.8,0.9/0.7,0.9/0.8"
"""That are tried: the paper's, and two with a larger rate."""
Results = dict[Run, Trained]
Chosen = Mapping[str, Nesterov]
"""By the kind of run."""


def tries(kinds: Sequence[str], common: Mapping[str, Any], recipe: Recipe, rules: Sequence[Nesterov]) -> list[Run]:
    """Return the first seed's runs of some kinds with each rule."""
    return [
        run
        for rule, kind in product(rules, kinds)
        for run in runs_of(kind, {**common, "recipe": replace(recipe, rule=rule)})
    ]


def runs_of(kind: str, mine: Mapping[str, Any]) -> list[Run]:
    """Return the runs of one kind; synchronous DiLoCo comes to the same at all speeds."""
    if kind == "diloco":
        return [Run(method=kind, **mine)]
    ahead = AHEAD if kind == BOUNDED else None
    return [Run(method=kind.split()[0], ahead=ahead, speeds=speeds, **mine) for speeds in MAIN]


def chosen_of(found: Results, inner_steps: int) -> Chosen:
    """Return the rule with which each kind came to the lowest loss, over the speeds."""
    losses: dict[str, dict[Nesterov, list[float]]] = {}
    for run, one in found.items():
        if run.inner_steps == inner_steps and run.seed == 0 and run.speeds in MAIN and not run.spoil:
            losses.setdefault(run.kind, {}).setdefault(run.recipe.rule, []).append(one.loss)
    return {kind: min(by_rule, key=lambda rule: statistics.mean(by_rule[rule])) for kind, by_rule in losses.items()}


def seeds_of(kinds: Sequence[str], common: Mapping[str, Any], recipes: Mapping[str, Recipe], seeds: int) -> list[Run]:
    """Return the runs of the other seeds, each kind with its rule."""
    return [
        run
        for seed in range(1, seeds)
        for kind in kinds
        for run in runs_of(kind, {**common, "seed": seed, "recipe": recipes[kind]})
    ]


class Trainer:
    """Trains in a few processes, and keeps what came of it."""

    def __init__(self, pool: ProcessPoolExecutor, keep: Path | None, *, so_far: bool) -> None:
        """`so_far`: take what is kept, and train nothing."""
        self._pool, self._keep, self._so_far = pool, keep, so_far
        self._begun_s = time.monotonic()
        self.found: Results = {}

    def train(self, runs: Sequence[Run]) -> None:
        """Train all; say how it goes."""
        if self._so_far:
            kept = {run: kept_of(run, self._keep) for run in runs}
            self.found |= {run: one for run, one in kept.items() if one}
            return
        for run, one in zip(runs, self._pool.map(train_or_read, runs, [self._keep] * len(runs)), strict=True):
            self.found[run] = one
            print(f"{run.name:56} {one.loss:.4f}   ({time.monotonic() - self._begun_s:.0f} s)", flush=True)


def trained(options: argparse.Namespace) -> tuple[Results, dict[int, Chosen]]:
    """Train all, what matters most first; return it, and each method's rule by H."""
    with workers(options.processes) as pool:
        trainer, most = Trainer(pool, options.keep, so_far=options.so_far), max(options.inner_steps)
        chosen = {
            inner_steps: _trained_with(trainer, inner_steps, options, spoils=inner_steps == most)
            for inner_steps in sorted(options.inner_steps, reverse=True)
        }
        common, recipe = _common(options, most), _recipe(options)
        others = [speeds for speeds in SPEEDS if speeds not in MAIN]
        mine = replace(recipe, rule=chosen[most].get(OURS, recipe.rule))
        trainer.train([Run(method="dp", recipe=recipe, **common)])
        trainer.train([Run(method=OURS, recipe=mine, speeds=speeds, **common) for speeds in others])
    return trainer.found, chosen


def _trained_with(trainer: Trainer, inner_steps: int, options: argparse.Namespace, *, spoils: bool) -> Chosen:
    """Train with one H, all but what only the largest has; return each kind's rule."""
    common, recipe = _common(options, inner_steps), _recipe(options)
    kinds = (OURS, BOUNDED, "diloco")
    trainer.train(tries(kinds, common, recipe, options.rules))
    chosen = chosen_of(trainer.found, inner_steps)
    recipes = {kind: replace(recipe, rule=chosen.get(kind, recipe.rule)) for kind in kinds}
    trainer.train(seeds_of(kinds, common, recipes, options.seeds))
    if spoils:
        trainer.train([Run(method=OURS, spoil=spoil, recipe=recipes[OURS], **common) for spoil in SPOILS])
    trainer.train(tries(("async-diloco",), common, recipe, options.rules))
    return chosen_of(trainer.found, inner_steps)


def _recipe(options: argparse.Namespace) -> Recipe:
    return Recipe(begun_steps=20) if options.quick else Recipe()


def _common(options: argparse.Namespace, inner_steps: int) -> dict[str, Any]:
    rounds = max(1, options.rounds * max(options.inner_steps) // inner_steps)
    return {"inner_steps": inner_steps, "rounds": rounds, "grace": options.grace}


def best_of(found: Results, chosen: Mapping[int, Chosen]) -> Results:
    """Return the runs with the rule that was best for their kind."""
    return {
        run: one
        for run, one in found.items()
        if run.recipe.rule == chosen[run.inner_steps].get(run.kind, run.recipe.rule)
    }


def comparable(found: Results) -> Results:
    """Return the runs for which there is a `diloco` of the same seed and H."""
    bases = {(run.seed, run.inner_steps) for run in found if run.method == "diloco"}
    return {run: one for run, one in found.items() if (run.seed, run.inner_steps) in bases}


def tried(found: Results) -> tuple[list[str], list[dict[str, Any]]]:
    """Return a line for each kind of run and H with the losses of each rule, over the speeds; and the same as data."""
    losses: dict[tuple[int, str], dict[Nesterov, list[float]]] = {}
    for run, one in found.items():
        if run.seed == 0 and run.speeds in MAIN and not run.spoil and run.method != "dp":
            by_rule = losses.setdefault((run.inner_steps, run.kind), {})
            by_rule.setdefault(run.recipe.rule, []).append(one.loss)
    lines, data = ["first seed, held out, by outer rate/momentum:"], []
    for (inner_steps, kind), by_rule in losses.items():
        means = {rule_text(rule): statistics.mean(ones) for rule, ones in by_rule.items()}
        told = "   ".join(f"{rule}: {loss:.4f}" for rule, loss in means.items())
        data.append({"inner_steps": inner_steps, "kind": kind, "held_out": means})
        lines.append(f"{inner_steps:3} {kind:13} {told}")
    return lines, data


def rule_text(rule: Nesterov) -> str:
    """Return rate/momentum.

    >>> rule_text(OuterRule())
    '0.7/0.8'
    """
    return f"{rule.learning_rate:g}/{rule.momentum:g}"


def rules_of(text: str) -> list[Nesterov]:
    """Read what `rule_text` makes, several with commas."""
    pairs = [one.split("/") for one in text.split(",")]
    return [Nesterov(learning_rate=float(rate), momentum=float(momentum)) for rate, momentum in pairs]


def base_of(found: Results, run: Run) -> float:
    """Return what `diloco` came to with the same seed and H."""
    return next(
        one.loss for other, one in found.items()
        if (other.method, other.seed, other.inner_steps) == ("diloco", run.seed, run.inner_steps)
    )  # fmt: skip


def table_of(found: Results) -> tuple[list[str], list[dict[str, Any]]]:
    """Return a line for each kind, speeds and H, over the seeds; and the same as data."""
    lines, data = [], []
    groups: dict[tuple[int, str, str], list[Trained]] = {}
    for run, one in found.items():
        if not run.spoil:
            groups.setdefault((run.inner_steps, run.kind, run.speeds), []).append(one)
    for (inner_steps, kind, speeds), ones in sorted(groups.items(), key=lambda group: (-group[0][0], group[0][1:])):
        over = [one.loss / base_of(found, one.run) - 1 for one in ones]
        loss, mean = statistics.mean(one.loss for one in ones), statistics.mean(over)
        stale, rule = statistics.mean(one.mean_staleness for one in ones), rule_text(ones[0].run.recipe.rule)
        part = statistics.mean(one.of_ideal for one in ones)
        row = {"inner_steps": inner_steps, "kind": kind, "speeds": speeds, "held_out": loss, "over_diloco": mean}
        row |= {"rule": rule, "mean_staleness": stale, "versions": ones[0].versions, "of_ideal": part}
        data.append({**row, "by_seed": over})
        told = " ".join(f"{100 * one:+.2f}" for one in over)
        shown, rule = "" if kind in ("dp", "diloco") else speeds, "" if kind == "dp" else rule
        ideal = f"{100 * part:5.1f} %" if shown else ""
        lines.append(
            f"{inner_steps:3} {kind:13} {shown:10} {rule:8} {loss:7.4f} {100 * mean:+8.2f} %   {told:22} {stale:6.1f} "
            f"{ideal:>8}"
        )
    return lines, data


def spoiled(found: Results) -> tuple[list[str], list[dict[str, Any]]]:
    """Return a line for each thing that a cluster may send; and the same as data."""
    away = next((one for run, one in found.items() if run.spoil == AWAY), None)
    if away is None:
        return [], []
    lines = [f"it is not there {'':18} {away.loss:9.4f}"]
    data: list[dict[str, Any]] = []
    for run, one in found.items():
        if run.spoil not in ("", AWAY):
            change = one.loss / away.loss - 1
            left_out = one.rejected_updates
            data.append({"sends": run.spoil, "held_out": one.loss, "over_away": change, "left_out": left_out})
            lines.append(f"it sends {run.spoil:25} {one.loss:9.4f} {100 * change:+8.2f} %   left out: {left_out}")
    return lines, data


def verdicts(rows: list[dict[str, Any]], bad: list[dict[str, Any]]) -> list[str]:
    """Return what holds of what is wanted."""
    told = {OURS: "outer", BOUNDED: f"outer with `ahead: {AHEAD:g}`"}
    said = []
    for kind, name in told.items():
        worst = max((row for row in rows if row["kind"] == kind), key=lambda row: row["over_diloco"])
        said.append(
            f"{name} within 1 % of diloco at the same tokens: {_holds(worst['over_diloco'] <= WITHIN)} "
            f"(worst: H {worst['inner_steps']}, {worst['speeds']}: {100 * worst['over_diloco']:+.2f} %)"
        )
    if bad:
        most = max(bad, key=lambda row: abs(row["over_away"]))
        said.append(
            f"a bad cluster changes the loss by under 1 %: {_holds(abs(most['over_away']) < CHANGED)} "
            f"(most: {most['sends']}, {100 * most['over_away']:+.2f} %)"
        )
    return said


def _holds(good: bool) -> str:
    return "holds" if good else "does not hold"


def plot(found: Results) -> str:
    """Draw the losses under way, of the first seed at the largest H."""
    most = max(run.inner_steps for run in found)
    lines = {
        f"{run.kind}, {run.speeds}" if run.method not in ("dp", "diloco") else run.method: [
            (float(4 * run.inner_steps * (k + 1) * run.recipe.tokens_per_step) / 1e3, loss)
            for k, loss in enumerate(one.losses)
        ]
        for run, one in found.items()
        if run.seed == 0 and run.inner_steps == most and not run.spoil and run.speeds in MAIN
    }
    return line_plot(lines, title="Held-out loss, four clusters", across="thousand tokens", up="loss")


def name_of(inner_steps: Sequence[int]) -> str:
    """Return what the results are called; those of other numbers of steps have these in the name.

    >>> name_of([64, 16]), name_of([32])
    ('outer_convergence', 'outer_convergence_h32')
    """
    others = "" if set(inner_steps) == set(INNER_STEPS) else "".join(f"_h{count}" for count in inner_steps)
    return f"outer_convergence{others}"


def main() -> int:
    """Train, print, write; return 1 if something that is wanted does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10, help="with the largest H; with others as many tokens")
    parser.add_argument("--inner-steps", type=int, nargs="+", default=INNER_STEPS)
    parser.add_argument("--grace", type=float, default=0.75, help="of the window, in rounds of the fastest cluster")
    parser.add_argument("--rules", type=rules_of, default=rules_of(RULES), help="outer RATE/MOMENTUM,...")
    parser.add_argument("--keep", type=Path, help="a folder for what was trained; what is there is not trained again")
    parser.add_argument(
        "--so-far", action="store_true", help="the table of what is kept; nothing is trained or written"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="little of everything, and nothing is written")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.rounds, options.inner_steps = 1, 2, [8]
    everything, chosen = trained(options)
    found = comparable(best_of(everything, chosen))
    lines, rows = table_of(found)
    bad_lines, bad = spoiled(found)
    try_lines, tries_data = tried(everything)
    said = verdicts(rows, bad)
    head = f"{'H':>3} {'method':13} {'speeds':10} {'rule':8} {'loss':>7} {'/ diloco':>9}"
    head += f"     {'by seed, %':22} {'stale':>6} {'of ideal':>9}"
    table = [head, *lines, "", *bad_lines, "", *try_lines, "", *said]
    print("\n".join(table))
    if not (options.quick or options.so_far):
        setting = {"seeds": options.seeds, "rounds": options.rounds, "grace": options.grace}
        data = {"emulated": "time: simulated; what is learned is real", "setting": setting, "tried": tries_data}
        save(name_of(options.inner_steps), table, {**data, "rows": rows, "one_bad_cluster": bad}, plot(found))
    return 0 if all(": holds" in line for line in said) else 1


if __name__ == "__main__":
    sys.exit(main())
