"""Print what streaming asks of lines: `outer_streaming.py [--steps N] [--quick]`.

The clusters, model and lines of `outer_throughput.py`, all lines alike, the model in 1, 2 and 4 fragments. How much a
cluster's line carries at most in any quarter of a round, as it sends (pushes) and as it gets (pulls), in models; how
long it is busy with an exchange, a push and a pull of one fragment; and what is left of the clusters' throughput. First
over lines of 10 Gbit/s, then over lines that are slower by as much as there are fragments.

Everything is SIMULATED, without numbers: computing, lines, and what waits for what; the master and the clients are the
ones that train. What streaming does to the loss is told by `outer_options.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outer_cases import FAST_LINE_GBIT, INNER_STEPS, SHARDS, SPEEDS, STEP_S, case_of
from results import save
from spantrain.sim.transfers import Arrived
from spantrain_studies.outer.bodies import PlainBodies
from spantrain_studies.outer.case import MemberLine, OuterCase
from spantrain_studies.outer.world import LineNetwork, OuterSimulation

FRAGMENTS = (1, 2, 4)
ROUND_S = INNER_STEPS * STEP_S
WINDOW_S = ROUND_S / 4


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A layer that went over the lines of two members."""

    source: str
    target: str
    size_bytes: int
    start_s: float
    sent_s: float
    """When its last byte had left."""


class WatchedLines(LineNetwork):
    """Lines that remember what they carried."""

    def __init__(self, simulation: OuterSimulation) -> None:
        super().__init__(simulation.clock, simulation.case)
        self.carried: list[Carried] = []

    def send(self, source: str, target: str, size_bytes: int, arrived: Arrived) -> None:
        """Carry so many bytes."""

        def noted(start_s: float, sent_s: float) -> None:
            ends = {"source": source, "target": target}
            self.carried.append(Carried(**ends, size_bytes=size_bytes, start_s=start_s, sent_s=sent_s))
            arrived(start_s, sent_s)

        super().send(source, target, size_bytes, noted)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of one run."""

    fragments: int
    line_gbit: float
    sends: float
    """At most in any quarter of a round, in models."""
    gets: float
    exchange_s: float
    staleness: float
    vs_ideal: float

    def __str__(self) -> str:
        return (
            f"{self.fragments:9} {self.line_gbit:6.1f} {self.sends:7.2f} {self.gets:7.2f} {self.exchange_s:10.1f} "
            f"{self.staleness:6.2f} {100 * self.vs_ideal:8.1f} %"
        )


HEAD = f"{'fragments':>9} {'Gbit/s':>6} {'sends':>7} {'gets':>7} {'exchange':>10} {'stale':>6} {'of ideal':>10}"
UNITS = f"{'':9} {'':6} {'models in a':>15} {'s':>10}\n{'':9} {'':6} {'quarter round':>15}"


def most_in_any(span_s: float, messages: Sequence[Carried]) -> float:
    """Return the most bytes that messages have in any span of time; each goes evenly from its start to its end.

    The most is in a span that begins where a message does, or ends where one does.
    """
    begins = {one.start_s for one in messages} | {one.sent_s - span_s for one in messages}
    return max((sum(_within(one, begin_s, begin_s + span_s) for one in messages) for begin_s in begins), default=0.0)


def _within(one: Carried, begin_s: float, end_s: float) -> float:
    shared_s = min(one.sent_s, end_s) - max(one.start_s, begin_s)
    return one.size_bytes * max(0.0, shared_s) / (one.sent_s - one.start_s)


def measured(case: OuterCase, fragments: int, line_gbit: float) -> Row:
    """Simulate a case with so many fragments."""
    simulation = OuterSimulation(replace(case, settings=replace(case.settings, fragments=fragments)), PlainBodies())
    simulation.lines = lines = WatchedLines(simulation)
    result = simulation.run()
    clusters = result.clusters
    # All begin with the first version, whole, and push all they have left at the end; between is what rounds ask for.
    later = [one for one in lines.carried if ROUND_S / 2 < one.start_s < result.span_s]
    sent, got = ([[one for one in later if end(one) == name] for name in clusters] for end in (_source, _target))
    return Row(
        fragments=fragments,
        line_gbit=line_gbit,
        sends=max(most_in_any(WINDOW_S, one) for one in sent) / case.model_bytes,
        gets=max(most_in_any(WINDOW_S, one) for one in got) / case.model_bytes,
        exchange_s=sum(one.comm_s for one in clusters.values()) / sum(one.outer_rounds for one in clusters.values()),
        staleness=sum(one.mean_staleness for one in clusters.values()) / len(clusters),
        vs_ideal=result.throughput_vs_ideal,
    )


def _source(one: Carried) -> str:
    return one.source


def _target(one: Carried) -> str:
    return one.target


def slower(case: OuterCase, times: int) -> OuterCase:
    """Return a case all of whose lines are so many times as slow."""

    def line_of(line: MemberLine) -> MemberLine:
        return replace(line, bandwidth_bytes_per_s=line.bandwidth_bytes_per_s / times)

    return replace(
        case,
        clusters=tuple(replace(one, line=line_of(one.line)) for one in case.clusters),
        shards=tuple(replace(one, line=line_of(one.line)) for one in case.shards),
    )


def main() -> int:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="of all clusters together")
    parser.add_argument("--quick", action="store_true", help="few steps, and nothing is written")
    options = parser.parse_args()
    speeds = next(iter(SPEEDS))
    case = case_of(SPEEDS[speeds], (FAST_LINE_GBIT,) * SHARDS, steps=1200 if options.quick else options.steps)
    rows = [measured(case, count, FAST_LINE_GBIT) for count in FRAGMENTS]
    rows += [measured(slower(case, count), count, FAST_LINE_GBIT / count) for count in FRAGMENTS[1:]]
    lines = [f"SIMULATED; clusters with {speeds}; a round takes {ROUND_S:.1f} s", HEAD, UNITS, *map(str, rows)]
    print("\n".join(lines))
    if not options.quick:
        save("outer_streaming", lines, {"emulated": "everything: simulated", "rows": [vars(one) for one in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
