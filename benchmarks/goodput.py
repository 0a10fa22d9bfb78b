"""Print what comes of runs whose devices leave and come: ours beside other systems, simulated; or ours alone, live.

python benchmarks/goodput.py [--simulated] [--pool laptop] [--hours 8] [--seeds 5] [--restart-s S] [--save]
python benchmarks/goodput.py --live [--minutes 10] [--no-network] [--save]

Simulated: all contestants go through the same losses by virtual time, on the same profile, with the same detection of a
loss; all plans' steps are the simulator's. Losses are drawn, each device's by itself with exponential times (`mtbf`);
they are no recorded trace of a cloud, whose rates they only resemble (Bamboo's paper has spot markets in which most of
a pool is lost within hours). Each rival's policy is written by its paper (`spantrain_studies.availability`, where each
says what is left out in its favour); what can be set of it is tuned on the very traces, as is the interval of
checkpoints of all, ours too. What all could have done: the planner's plans for the devices present, with no pause.

Live: gpt2-tiny on the preset `laptop`; workers are killed in turn, two a minute, and come back 15 s later; nothing is
written to a disk, state is kept twice. Real: processes, signals, computation, gradients, losses, TCP, encryption.
Emulated: the devices' time and the links.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from typing import Any

import results
from goodput_cases import NAMES, OURS, POOLS, RATES_H, Contest, Pool, Tuned, measured_restart_s
from goodput_live import live


def measure(pool: Pool, *, hours: float, seeds: int, restart_s: float) -> dict[str, Any]:
    """Return the figures of a pool, by rate of losses."""
    contest, found = Contest(pool, hours, restart_s), dict[str, Any]()
    for rate in RATES_H:
        traces = [contest.events(rate, seed) for seed in range(1, seeds + 1)]
        possible = [contest.possible(events) for events in traces]
        losses = [sum(not event.comes for event in events) for events in traces]
        rows: dict[str, Any] = {}
        ours: Tuned | None = None
        for name in NAMES:
            tuned = contest.tuned(name, traces)
            ours = tuned if name == OURS else ours
            rows[name] = None if tuned is None else figures(tuned, ours or tuned, possible, hours)
            print(f"  {pool.name}, {rate}, {name}: {_said(rows[name])}", flush=True)
        found[rate] = {"losses": losses, "possible_samples": possible, "contestants": rows}
    return found


def figures(tuned: Tuned, ours: Tuned, possible: list[float], hours: float) -> dict[str, Any]:
    """Return medians over seeds, and what they are of."""
    shares = [run.samples / most for run, most in zip(tuned.runs, possible, strict=True)]
    ratios = [
        own.samples / run.samples if run.samples else None for own, run in zip(ours.runs, tuned.runs, strict=True)
    ]
    finite = [ratio for ratio in ratios if ratio is not None]
    return {
        "share": statistics.median(shares), "shares": shares,
        "samples_per_s": tuned.samples / hours / 3600,
        "steps_lost": statistics.median(run.steps_lost for run in tuned.runs),
        "paused_s": statistics.median(run.paused_s for run in tuned.runs),
        "restarts": statistics.median(run.restarts for run in tuned.runs),
        "ours_over": statistics.median(finite) if finite else None, "least_over": min(finite, default=None),
        "settings": tuned.settings, "checkpoint_every_s": tuned.every_s, "tried": tuned.tried,
        "runs": [asdict(run) for run in tuned.runs],
    }  # fmt: skip


def _said(found: dict[str, Any] | None) -> str:
    if found is None:
        return "cannot run"
    over = "-" if found["ours_over"] is None else f"{found['ours_over']:.2f}"
    return (
        f"{found['share']:.3f} of what could be done, ours over it {over}; {found['settings']}, "
        f"checkpoints each {found['checkpoint_every_s']:g} s"
    )


def table_of(pool: Pool, found: dict[str, Any]) -> list[str]:
    """Return lines for people."""
    lines = [f"{pool.name}: {pool.model}, batch {pool.batch}, {len(pool.cluster.devices)} devices"]
    for rate, own in found.items():
        lines.append(
            f"  {rate}: a device is lost each {RATES_H[rate]:g} h and back after 10 min on average; "
            f"{statistics.median(own['losses']):.0f} losses"
        )
        head = f"{'share':>9}{'samples/s':>11}{'steps lost':>12}{'restarts':>10}{'stood still':>13}{'ours over it':>14}"
        lines.append(f"    {'':<10}{head}  as tuned")
        for name, row in own["contestants"].items():
            if row is None:
                lines.append(f"    {name:<10}{'cannot run':>9}")
                continue
            over = "-" if row["ours_over"] is None or name == OURS else f"{row['ours_over']:.2f}"
            lines.append(
                f"    {name:<10}{row['share']:>9.3f}{row['samples_per_s']:>11.4g}{row['steps_lost']:>12.0f}"
                f"{row['restarts']:>10.0f}{row['paused_s']:>11.0f} s{over:>14}"
                f"  {row['settings']}, checkpoints each {row['checkpoint_every_s']:g} s"
            )
    return lines


def main() -> int:
    """Measure; with `--live`, return 1 if something that is wanted is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--simulated", action="store_true", help="by virtual time, the default")
    which.add_argument("--live", action="store_true", help="kill real workers")
    parser.add_argument("--pool", action="append", choices=[pool.name for pool in POOLS], help="default: all")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--restart-s", type=float, help="default: as recovery.py measured it")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--no-network", action="store_true", help="live: all on loopback, unshaped")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    if options.live:
        table, data = live(options.minutes, network=not options.no_network)
    else:
        restart_s = measured_restart_s() if options.restart_s is None else options.restart_s
        data = {"restart_s": restart_s, "hours": options.hours, "seeds": options.seeds, "pools": {}}
        table = [
            f"{options.hours:g} h, {options.seeds} seeds, medians; a restart takes {restart_s:.1f} s and the reading "
            "of the checkpoint"
        ]
        for pool in POOLS:
            if pool.name in (options.pool or [pool.name]):
                found = measure(pool, hours=options.hours, seeds=options.seeds, restart_s=restart_s)
                data["pools"][pool.name] = found
                table += table_of(pool, found)
    print("\n".join(table))
    if options.save:
        results.save("goodput_live" if options.live else "goodput", table, {"results": data})
    return int(any(line.endswith("missed") for line in table))


if __name__ == "__main__":
    sys.exit(main())
