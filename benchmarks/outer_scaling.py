"""Print what part of the ideal clusters reach as more join: `outer_scaling.py [--live] [--steps N] [--quick]`.

After Di-PS, 5.2 and figure 10: 1 to 7 clusters, added from the fastest to the slowest, each with a whole copy; the
first has a line of 5 Gbit/s, the others of 10. `ideal`: each cluster trains alone, all the time. Wanted: at least
98.6 % of it for `outer`. What is simulated, live and emulated: as `outer_throughput.py` says. The speeds are made up,
in the paper's order.
"""

import argparse
import sys

from outer_cases import SCALING_LINES_GBIT, SCALING_SPEEDS, case_of
from outer_live import LIVE_SCALE, measure_live
from results import line_plot, save
from spantrain_studies.outer.case import OuterResult
from spantrain_studies.outer.methods import simulate_method

METHODS = ("diloco", "async-diloco", "outer")
WANTED = 0.986
SIMULATED_STEPS, LIVE_SECONDS = 40_000, 40.0
MOST = len(SCALING_SPEEDS)


def measured(options: argparse.Namespace) -> dict[int, dict[str, OuterResult]]:
    """Run all methods with each number of clusters."""
    found: dict[int, dict[str, OuterResult]] = {}
    for count in options.clusters:
        parts = tuple(1 / speed for speed in SCALING_SPEEDS[:count])
        lines = SCALING_LINES_GBIT[:count]
        if options.live:
            case = case_of(parts, lines, seconds=options.seconds, scale=LIVE_SCALE)
            found[count] = {method: measure_live(method, case) for method in METHODS}
        else:
            case = case_of(parts, lines, steps=options.steps)
            found[count] = {method: simulate_method(method, case) for method in METHODS}
        print(line_of(count, found[count]), flush=True)
    return found


def line_of(count: int, results: dict[str, OuterResult]) -> str:
    """Return a line of the table."""
    parts = " ".join(f"{100 * results[method].throughput_vs_ideal:14.1f} %" for method in METHODS)
    return f"{count:8} {results['outer'].tokens_per_s:12.0f} {parts}"


def main() -> int:
    """Run, print, write; return 1 if what is wanted does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="processes on a shaped network, not the simulator")
    parser.add_argument("--steps", type=int, default=SIMULATED_STEPS, help="simulated, of all clusters together")
    parser.add_argument("--seconds", type=float, default=LIVE_SECONDS, help="live, of each method in each case")
    parser.add_argument("--clusters", type=int, nargs="+", default=range(1, MOST + 1), choices=range(1, MOST + 1))
    parser.add_argument("--quick", action="store_true", help="little of everything, and nothing is written")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seconds = 4000, 8.0
    way = "live, processes on a shaped network" if options.live else "SIMULATED in virtual time"
    head = f"{'clusters':>8} {'outer':>12} " + " ".join(f"{method:>16}" for method in METHODS)
    units = f"{'':>8} {'tokens/s':>12} " + " ".join(f"{'of ideal':>16}" for _ in METHODS)
    print(f"{way}\n{head}\n{units}", flush=True)
    found = measured(options)
    least = min(results["outer"].throughput_vs_ideal for results in found.values())
    holds = least >= WANTED
    verdict = "holds" if holds else "does not hold"
    said = f"outer: at least {100 * least:.1f} % of ideal; wanted {100 * WANTED:.1f} %: {verdict}"
    print(said)
    if not options.quick:
        rows = [line_of(count, results) for count, results in found.items()]
        data = {
            "emulated": "the network, and the time of inner steps" if options.live else "everything: simulated",
            "vs_ideal": {
                str(count): {method: one.throughput_vs_ideal for method, one in results.items()}
                for count, results in found.items()
            },
        }
        lines = {
            method: [(float(count), results[method].throughput_vs_ideal) for count, results in found.items()]
            for method in METHODS
        }
        plot = line_plot(lines, title="Part of the ideal, by clusters", across="clusters", up="of ideal")
        save(
            "outer_scaling" + ("" if options.live else "_simulated"),
            [way, "", head, units, *rows, "", said],
            data,
            plot,
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
