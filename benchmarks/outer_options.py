"""Print what options of the outer optimizer do to the loss: `outer_options.py [--speeds S] [--quick] OPTION...`.

The training is that of `outer_convergence.py`: a GPT of 1.07 million parameters on real text, four clusters of unequal
speed, the held-out loss when all together have trained on as many tokens. An option is the name of a wire format of
pushes (`int8`), `compensation=PART` for a correction of pushes by what came since they began, `staleness=POWER`,
`fragments=COUNT` for streaming (with as many shards as have a layer of each), several of these joined by `+`, or
`plain`. All have the same seed, data, rule and time of grace; lines are as slow as there, and a push in fewer bytes
takes its line for less time.

Real: parameters, gradients, losses, rounding, shards' sums and updates, the master's and the clients' decisions.
Simulated: time.
"""

import argparse
import gc
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from outer_gpt import Recipe, begun
from outer_training import SPEEDS, OuterBodies, Run, case_of
from results import save
from spantrain.formats.registry import WireFormat
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain_studies.outer.methods import simulate_method

DEFAULT = ("plain", "bfloat16", "int8", "int4", "compensation=0.1", "staleness=0.5", "fragments=3")


def settings_of(option: str, settings: OuterSettings) -> OuterSettings:
    """Return settings with an option, as it is written on the command line.

    Raises:
        ValueError: there is no such option.
    """
    changes: dict[str, Any] = {}
    for part in option.split("+"):
        name, _, value = part.partition("=")
        if name == "compensation":
            changes["compensation"] = float(value)
        elif name == "staleness":
            changes["staleness_power"] = float(value)
        elif name == "fragments":
            changes["fragments"] = int(value)
        elif name != "plain":
            changes["push_format"] = WireFormat(name)
    return replace(settings, **changes)


def trained(run: Run, option: str) -> tuple[float, float, float]:
    """Train; return the held-out loss, the mean staleness, and seconds of a cluster's line busy in a round."""
    start = begun(replace(run.recipe, rule=Nesterov()), run.seed)
    bodies, case = OuterBodies(run, start), case_of(run, start)
    settings = settings_of(option, case.settings)
    shards = case.shards[: len(case.layers) // settings.fragments]
    result = simulate_method("outer", replace(case, shards=shards, settings=settings), bodies)
    clusters = result.clusters.values()
    rounds = sum(one.outer_rounds for one in clusters)
    stale = sum(one.mean_staleness for one in clusters) / len(clusters)
    return bodies.loss(), stale, sum(one.comm_s for one in clusters) / max(1, rounds)


def main() -> int:
    """Train with each option, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", default=DEFAULT, metavar="OPTION", help=f"by default {' '.join(DEFAULT)}")
    parser.add_argument("--speeds", choices=tuple(SPEEDS), default="5.2 times", help="of the clusters")
    parser.add_argument("--inner-steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="little of everything, and nothing is written")
    options = parser.parse_args()
    recipe = Recipe(begun_steps=20) if options.quick else Recipe()
    inner_steps, rounds = (8, 2) if options.quick else (options.inner_steps, options.rounds)
    torch.set_num_threads(1)
    base: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    lines = [f"{'option':28} {'seed':>4} {'held out':>9} {'/ first':>9} {'stale':>6} {'exchange':>9}"]
    for option in options.options:
        for seed in range(options.seeds):
            begun_s = time.monotonic()
            run = Run(
                method="outer", speeds=options.speeds, inner_steps=inner_steps, rounds=rounds, seed=seed, recipe=recipe
            )
            loss, stale, exchange_s = trained(run, option)
            gc.collect()  # clusters and clocks refer to each other, and to models
            over = loss / base.setdefault(seed, loss) - 1
            rows.append(
                {"option": option, "seed": seed, "held_out": loss, "over_first": over, "exchange_s": exchange_s}
            )
            lines.append(f"{option:28} {seed:4} {loss:9.4f} {100 * over:+7.2f} % {stale:6.1f} {exchange_s:7.1f} s")
            print(f"{lines[-1]}   ({time.monotonic() - begun_s:.0f} s)", file=sys.stderr, flush=True)
    print("\n".join(lines))
    if not options.quick:
        setting = {"speeds": options.speeds, "inner_steps": inner_steps, "rounds": rounds, "seeds": options.seeds}
        save("outer_options", lines, {"emulated": "time: simulated; what is learned is real", **setting, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
