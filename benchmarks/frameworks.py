"""Print our runtime beside torch's frameworks and other planners on the papers' clusters, case by case.

Every case is one `spantrain compare` with the same samples, devices and network for all methods. Real: computation,
gradients, losses, TCP. Emulated: the time of devices, and the links (one machine's network namespaces). Models are
scaled down, and with them devices, links, batch and latencies, until compute weighs beside traffic what it does for
full-size models in the papers' settings; how, and where that could not be reached, stands beside each table. A case
that has its file in the results' folder is not run again, so an interrupted run goes on.

Run: `python benchmarks/frameworks.py --case asteroid-b-100/gpt2-tiny`, or without --case for all of them.
"""

import argparse
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results import FOLDER, save

RUNS = Path("runs") / "frameworks"
"""Where comparisons leave their profiles and logs."""
MODELS = ("gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny")
FRAMEWORKS = ("ddp", "fsdp", "torch-gpipe", "torch-1f1b", "torch-zb")
METHODS = ",".join((*FRAMEWORKS, "auto", "auto-adapter-off", "best-site", "asteroid", "spantrain"))
SETTING_1_GOALS = {"ddp": 2.4, "fsdp": 2.2, "torch-gpipe": 1.8, "torch-1f1b": 1.6}
"""What is wanted of `auto` there, over each of these."""
SITE_GOAL = 0.98
"""What is wanted of `auto` everywhere, over the best single site."""
OUR_BOUNDS = {"compute": "compute", "chosen_plan": "the plan's own work, links and latency"}
"""What `auto` cannot pass whatever it does."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One of the papers' clusters, at a scale."""

    preset: str
    devices_per_site: int | None = None


SETTINGS = {
    "setting-1": Setting(preset="spantrain-setting-1", devices_per_site=2),
    "setting-2": Setting(preset="spantrain-setting-2", devices_per_site=2),
    "asteroid-b-100": Setting(preset="asteroid-b-100"),
    "asteroid-b-1000": Setting(preset="asteroid-b-1000"),
    "asteroid-c-100": Setting(preset="asteroid-c-100"),
    "asteroid-c-1000": Setting(preset="asteroid-c-1000"),
}
CASES = tuple(f"{setting}/{model}" for setting in SETTINGS for model in MODELS)


def main() -> None:
    """Run the cases that have no result yet, print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; repeatable")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds-per-method", type=float, default=8.0, help="of a round; one step at least")
    parser.add_argument("--emulated-speed", type=float, help="default: what this machine can emulate")
    parser.add_argument("--note", default="", help="what else is to be known of this run, kept with its result")
    options = parser.parse_args()
    cases = options.case or CASES
    missing = [case for case in cases if not _file(case).exists()]
    for number, case in enumerate(missing):
        print(f"case {number + 1} of {len(missing)}: {case}", file=sys.stderr, flush=True)
        run_case(case, options)
    for case in cases:
        print(_file(case).with_suffix(".txt").read_text(encoding="utf-8"))


def run_case(case: str, options: argparse.Namespace) -> None:
    """Compare, and keep what came out with where it came from."""
    name, model = case.split("/")
    setting = SETTINGS[name]
    folder = RUNS / name / model
    words = [
        *("--preset", setting.preset, "--model", model, "--methods", options.methods),
        *("--steps", options.steps, "--rounds", options.rounds),
        *("--seconds-per-method", options.seconds_per_method),
        *(("--devices-per-site", setting.devices_per_site) if setting.devices_per_site else ()),
        *(("--emulated-speed", options.emulated_speed) if options.emulated_speed else ()),
        *("--out", folder, "--json"),
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "spantrain", "compare", *map(str, words)], stdout=subprocess.PIPE, text=True, check=True
    )
    comparison = json.loads(ended.stdout)
    document = {"case": case, "note": options.note, "goals": goals(case, comparison), "comparison": comparison}
    save(_name(case), lines(case, document), document, (folder / "compare.svg").read_text(encoding="utf-8"))


def goals(case: str, comparison: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return how far `auto` is over each method, and what is wanted there; where it is missed, what forbids it."""
    rows, bounds = comparison["methods"], comparison["bounds"]
    if "auto" not in rows:
        return {}
    wanted = {name: 1.0 for name in FRAMEWORKS if name in rows}
    if case.startswith("setting-1/"):
        wanted |= {name: goal for name, goal in SETTING_1_GOALS.items() if name in rows}
    if "best-site" in rows:
        wanted["best-site"] = SITE_GOAL
    ours = rows["auto"]["samples_per_s"]
    found: dict[str, dict[str, Any]] = {}
    for name, goal in wanted.items():
        other = rows[name]["samples_per_s"]
        met = ours / other >= goal
        found[name] = {"ratio": ours / other, "goal": goal, "met": met, "why": "" if met else why(other, goal, bounds)}
    return found


def why(other: float, goal: float, bounds: dict[str, float | None]) -> str:
    """Return the bounds under which no plan is so much faster than a method, or what is left to be explained."""
    allowed = {name: bounds[name] / other for name in OUR_BOUNDS if bounds[name] is not None}
    forbidding = [f"{OUR_BOUNDS[name]} allows {ratio:.2f}" for name, ratio in allowed.items() if ratio < goal]
    return ", ".join(forbidding) or "no bound forbids it"


def lines(case: str, document: dict[str, Any]) -> list[str]:
    """Return a case's table and what it is to be read with."""
    comparison = document["comparison"]
    scale, setting = comparison["setting"]["scale"], comparison["setting"]
    text = io.StringIO()
    console = Console(width=140, file=text)
    title = f"{case}: {setting['global_batch']} samples a step, {scale['devices']} of {scale['devices_before']} devices"
    table = Table("method", "samples/s", "ratio", "auto over it", "wanted", "busy", "real compute", "how", title=title)
    for name in setting["methods"]:
        row = comparison["methods"][name]
        goal = document["goals"].get(name)
        table.add_row(
            name,
            f"{row['samples_per_s']:.4g}" + ("" if row["steps"] > 1 else " (1 step)"),
            f"{row['ratio_to_first']:.2f}",
            f"{goal['ratio']:.2f}" if goal else "",
            _wanted(goal),
            f"{row['utilisation']:.0%}",
            f"{row['real_compute_ratio']:.0%}",
            row["what"],
        )
    console.print(table)
    for name, reason in comparison["refused"].items():
        console.print(f"  {name}: {reason}", highlight=False)
    bounds = ", ".join(f"{name} {value:.4g}" for name, value in comparison["bounds"].items() if value is not None)
    console.print(f"  bounds, samples/s: {bounds}", highlight=False)
    console.print(f"  {scale_text(scale)}", highlight=False)
    console.print(f"  {comparison['emulated']}; planned by {setting['planned_by']}", highlight=False)
    console.print(f"  {document['note']}", highlight=False)
    return text.getvalue().splitlines()


def scale_text(scale: dict[str, Any]) -> str:
    """Say how far a setting is from life."""
    devices, links = scale["emulated_speed"], scale["network_speed"]
    text = f"devices at {devices:.3g} of their speed, links at {links:.3g} of their rates"
    text += f" and {scale['latency_scale']:.3g} times as far"
    like = scale["like"]
    if like is None:
        return text
    kept = (f"{name} {like['here'][name]:.3g} (there {like['full'][name]:.3g})" for name in ("cuts", "sums", "latency"))
    model = f"like {like['full_size']} with {like['full_global_batch']:.4g} samples a step"
    return "; ".join((text, f"{model}: compute over {', '.join(kept)}", *like["bounded"]))


def _wanted(goal: dict[str, Any] | None) -> str:
    if goal is None:
        return ""
    return f"{goal['goal']:.2f}" + ("" if goal["met"] else f" (missed: {goal['why']})")


def _name(case: str) -> str:
    return f"frameworks-{case.replace('/', '-')}"


def _file(case: str) -> Path:
    return FOLDER / f"{_name(case)}.json"


if __name__ == "__main__":
    main()
