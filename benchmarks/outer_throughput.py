"""Print how fast clusters train together by each method: `outer_throughput.py [--live] [--steps N] [--quick]`.

After Di-PS, 5.1 and figures 9 and 11: four clusters, uniform delays or one 5.2 times as slow, three lines of 10 Gbit/s
and one of 1 to 10. Methods: `dp`, `diloco` (synchronous), `async-diloco` (decentralized, naive), `outer` (ours); what
each is and does stands in `spantrain_studies.outer.methods`. `ideal`: each cluster trains alone, all the time.

Simulated (as it stands): computing, lines, and what waits for what, at full size; the master and the clients are the
ones that train. Live (`--live`): processes on a shaped network, a thousandth as large and ten times as quick, with the
same ratios; real are the messages, encryption, sums and updates; emulated are the time of inner steps and the network.
With torchft installed its DiLoCo runs too; it is left out, and said to be, where it is not.

Two times are told for communication: how long a cluster's line carries parameters (of its own exchanges or, without a
server, of anybody's: all take part in each), added up over clusters; and how long clusters stand still, waiting or
exchanging. Bounds wanted: 1.38 times `diloco` where delays are uniform, 2.9 times with the slow cluster, at least
`async-diloco` everywhere, and no more communication than it.

That 1.38 is the paper's at its best bandwidth. Without any time for communication uniform delays allow
(1 + 1/1.16 + 1/1.33 + 1/1.5) / (4 / 1.5) = 1.23; the rest is what `diloco` waits for its exchanges.
"""

import argparse
import sys
from typing import Any

from outer_cases import BANDWIDTHS_GBIT, FAST_LINE_GBIT, SPEEDS, case_of
from outer_live import LIVE_SCALE, live_methods, measure_live
from results import line_plot, save
from spantrain_studies.outer.case import OuterResult
from spantrain_studies.outer.methods import METHODS, simulate_method

WANTED = dict(zip(SPEEDS, (1.38, 2.9), strict=True))
SIMULATED_STEPS, LIVE_SECONDS = 40_000, 40.0

Found = dict[str, dict[float, dict[str, OuterResult]]]
"""By speeds, bandwidth of the last line, and method."""


def measured(options: argparse.Namespace) -> Found:
    """Run all methods in all cases."""
    found: Found = {}
    for speeds, parts in SPEEDS.items():
        for gbit in options.bandwidths:
            lines = (*(FAST_LINE_GBIT,) * 3, gbit)
            if options.live:
                case = case_of(parts, lines, seconds=options.seconds, scale=LIVE_SCALE)
                results = {method: measure_live(method, case) for method in live_methods()}
            else:
                case = case_of(parts, lines, steps=options.steps)
                results = {method: simulate_method(method, case) for method in METHODS}
            found.setdefault(speeds, {})[gbit] = results
            for line in table_of(speeds, gbit, results):
                print(line, flush=True)
    return found


def table_of(speeds: str, gbit: float, results: dict[str, OuterResult]) -> list[str]:
    """Return a line for each method."""
    base = results["diloco"].tokens_per_s
    return [
        f"{speeds:24} {gbit:6.0f} {method:13} {one.tokens_per_s:9.0f} {one.tokens_per_s / base:8.2f} "
        f"{100 * one.throughput_vs_ideal:7.1f} % {per_token(one, one.comm_s):9.1f} {per_token(one, still_s(one)):9.1f}"
        for method, one in results.items()
    ]


def still_s(one: OuterResult) -> float:
    """Return how long all clusters together stood still."""
    return sum(cluster.stood_still_s for cluster in one.clusters.values())


def per_token(one: OuterResult, seconds: float) -> float:
    """Return seconds for each 100 million tokens."""
    return seconds / one.tokens * 1e8


def verdicts(found: Found) -> list[str]:
    """Return what holds of what is wanted."""
    said = []
    for speeds, by_line in found.items():
        ratios = {gbit: all_["outer"].tokens_per_s / all_["diloco"].tokens_per_s for gbit, all_ in by_line.items()}
        best = max(ratios, key=lambda gbit: ratios[gbit])
        holds = "holds" if ratios[best] >= WANTED[speeds] else "does not hold"
        least = min(ratios.values())
        said.append(
            f"{speeds}: {least:.2f} to {ratios[best]:.2f} times diloco (best at {best:g} Gbit/s); "
            f"wanted {WANTED[speeds]}: {holds}"
        )
    pairs = [(all_["outer"], all_["async-diloco"]) for by_line in found.values() for all_ in by_line.values()]
    faster = all(ours.tokens_per_s >= other.tokens_per_s for ours, other in pairs)
    briefer = all(per_token(ours, ours.comm_s) <= per_token(other, other.comm_s) for ours, other in pairs)
    said.append(f"never under naive asynchronous training: {'holds' if faster else 'does not hold'}")
    said.append(f"no more communication than it at any bandwidth: {'holds' if briefer else 'does not hold'}")
    return said


def plain(found: Found) -> dict[str, Any]:
    """Return what is kept as JSON."""
    return {
        speeds: {
            f"{gbit:g}": {
                method: {
                    "tokens_per_s": one.tokens_per_s, "vs_ideal": one.throughput_vs_ideal, "tokens": one.tokens,
                    "comm_s": one.comm_s, "stood_still_s": still_s(one), "versions": one.versions,
                }
                for method, one in results.items()
            }
            for gbit, results in by_line.items()
        }
        for speeds, by_line in found.items()
    }  # fmt: skip


def main() -> int:
    """Run, print, write; return 1 if something that is wanted does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="processes on a shaped network, not the simulator")
    parser.add_argument("--steps", type=int, default=SIMULATED_STEPS, help="simulated, of all clusters together")
    parser.add_argument("--seconds", type=float, default=LIVE_SECONDS, help="live, of each method in each case")
    parser.add_argument("--bandwidths", type=float, nargs="+", help="of the last line, Gbit/s at full size")
    parser.add_argument("--quick", action="store_true", help="little of everything, and nothing is written")
    options = parser.parse_args()
    few = options.quick or options.live
    options.bandwidths = options.bandwidths or ((BANDWIDTHS_GBIT[0], BANDWIDTHS_GBIT[-1]) if few else BANDWIDTHS_GBIT)
    if options.quick:
        options.steps, options.seconds = 2000, 8.0
    way = "live, processes on a shaped network" if options.live else "SIMULATED in virtual time"
    head = (
        f"{'':24} {'line 4':>6} {'method':13} {'tokens/s':>9} {'/ diloco':>8} {'of ideal':>9} {'comm':>9} {'still':>9}"
    )
    units = f"{'':24} {'Gbit/s':>6} {'':13} {'':>9} {'':>8} {'':>9} {'s / 1e8':>9} {'s / 1e8':>9}"
    print(f"{way}\n{head}\n{units}", flush=True)
    found = measured(options)
    said = verdicts(found)
    print("\n".join(said))
    if not options.quick:
        rows = [
            line for speeds, one in found.items() for gbit, results in one.items()
            for line in table_of(speeds, gbit, results)
        ]  # fmt: skip
        emulated = "the network, and the time of inner steps" if options.live else "everything: simulated"
        name = "outer_throughput" + ("" if options.live else "_simulated")
        save(name, [way, "", head, units, *rows, "", *said], {"emulated": emulated, "cases": plain(found)}, plot(found))
    return 0 if all(line.endswith(": holds") for line in said) else 1


def plot(found: Found) -> str:
    """Draw what part of the ideal each method reaches, by bandwidth."""
    lines = {
        f"{method}, {speeds.split(' ')[-1] if 'slow' not in speeds else '5.2 times'}": [
            (gbit, results[method].throughput_vs_ideal) for gbit, results in by_line.items()
        ]
        for speeds, by_line in found.items()
        for method in next(iter(by_line.values()))
    }
    return line_plot(lines, title="Part of the ideal", across="Gbit/s of the last line", up="of ideal")


if __name__ == "__main__":
    sys.exit(main())
