"""First-level groups under noise, and what second-level groups bring: `benchmarks/second_level.py [--only TABLE]`.

`groups`: the way between edge and end (on `laptop`, lab and office) takes from 0.2 to 25 ms; every rate, latency and
score is off by up to 10 %, anew for each of many seeds. Which groups come, and how often.

`ablation`: samples per second of the strategy `spantrain` with second-level groups and without (`spantrain plan
--strategy spantrain --no-second-level`), simulated: the papers' settings with all three sites in use, at several
latencies between edge and end, since the papers give none; and clusters whose groups are mixed.

Nothing is measured: profiles are by data sheets and described networks.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paper_rows import Contest
from paper_spantrain_cases import NO_SECOND, SITES, with_cards, without_second_level
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster
from spantrain.core.profile import Profile
from spantrain.models.catalog.catalog import is_text, resolve_model
from spantrain.planner.groups import group_devices
from spantrain.planner.request import Constraints, JobSpec

SEEDS, NOISE = 50, 0.1
LATENCIES_S = (0.2e-3, 0.5e-3, 1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 4e-3, 5e-3, 10e-3, 25e-3)
WAYS = {
    "spantrain-setting-1": ("edge", "end"),
    "spantrain-setting-2": ("edge", "end"),
    "spantrain-table-1": ("edge", "end"),
    "laptop": ("lab", "office"),
}
"""Between which sites the latency is changed."""
MODELS = ("resnet-101", "efficientnet-b1", "bert-small", "gpt2-small")
ABLATED_S = (0.2e-3, 5e-3, 25e-3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster, a model and a job."""

    preset: str
    model: str
    batch: int = 128
    latency_s: float | None = None
    """Between two of its sites; None: as in the preset, and sites may be left out."""


MIXED = (
    *(Case(preset="spantrain-cn", model=model) for model in ("resnet-101", "gpt2-small")),
    *(
        Case(preset=preset, model=model)
        for preset in ("asteroid-b-1000", "asteroid-c-1000", "asteroid-d-1000")
        for model in ("efficientnet-b1", "bert-small")
    ),
    Case(preset="laptop", model="gpt2-tiny", batch=64),
)


def with_latency(cluster: Cluster, sites: tuple[str, str], latency_s: float) -> Cluster:
    """Return the cluster with another latency between two sites."""
    links = (
        replace(link, latency_s=latency_s) if {link.source, link.target} == set(sites) else link
        for link in cluster.links
    )
    return replace(cluster, links=tuple(links))


def noisy(profile: Profile, seed: int) -> Profile:
    """Return the profile as if it had been measured, with every rate, latency and score off by up to `NOISE`."""
    draw = random.Random(seed)

    def off() -> float:
        return 1 + draw.uniform(-NOISE, NOISE)

    links = tuple(
        replace(link, latency_s=link.latency_s * off(), bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * off())
        for link in profile.link_by_pair.values()
    )
    scores = tuple(replace(entry, score=entry.score * off()) for entry in profile.scores)
    return replace(profile, links=links, scores=scores, links_described=False)


def sweep() -> Iterator[str]:
    """Yield lines: which groups come at each latency, and of how many seeds."""
    yield f"| cluster | latency | groups of {SEEDS} seeds |"
    yield "|---|---|---|"
    for preset, sites in WAYS.items():
        base = described_profile(load_preset(preset), resolve_model("gpt2-tiny"))
        for latency_s in LATENCIES_S:
            profile = replace(base, cluster=with_latency(base.cluster, sites, latency_s))
            found = Counter(
                ", ".join(group.name for group in group_devices(noisy(profile, seed))) for seed in range(SEEDS)
            )
            rows = "; ".join(f"{names}: {count}" for names, count in found.most_common())
            yield f"| {preset} | {latency_s * 1e3:g} ms | {rows} |"


def contest_of(case: Case) -> Contest:
    """Return the contest between the planner with and without the second level."""
    cluster = load_preset(case.preset)
    if case.latency_s is not None:
        cluster = with_latency(with_cards(cluster), WAYS[case.preset], case.latency_s)
    model = resolve_model(case.model)
    if is_text(model) and case.latency_s is not None:
        model = resolve_model(case.model, sequence_length=512)
    return Contest(
        profile=described_profile(cluster, model),
        job=JobSpec(global_batch=case.batch),
        constraints=Constraints(keep=() if case.latency_s is None else SITES),
        contenders={NO_SECOND: without_second_level},
    )


def ablation() -> Iterator[str]:
    """Yield lines: samples per second with and without, and the share that is lost."""
    yield "| cluster | edge-end | first-level groups | model | with | without | lost |"
    yield "|---|---|---|---|---|---|---|"
    papers = (
        Case(preset=preset, model=model, latency_s=latency_s)
        for preset in ("spantrain-setting-1", "spantrain-setting-2")
        for latency_s in ABLATED_S
        for model in MODELS
    )
    for case in (*papers, *MIXED):
        contest = contest_of(case)
        whole, part = contest.answer("spantrain"), contest.answer(NO_SECOND)
        groups = ", ".join(group.name for group in group_devices(contest.profile))
        way = "-" if case.latency_s is None else f"{case.latency_s * 1e3:g} ms"
        cells = [
            answer.reason if answer.samples_per_s is None else f"{answer.samples_per_s:.4g}" for answer in (whole, part)
        ]
        lost = (
            f"{100 * (1 - part.samples_per_s / whole.samples_per_s):.1f} %"
            if whole.samples_per_s and part.samples_per_s
            else "-"
        )
        yield f"| {case.preset} | {way} | {groups} | {case.model} | {cells[0]} | {cells[1]} | {lost} |"


TABLES = {"groups": sweep, "ablation": ablation}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=TABLES, default=None)
    only = parser.parse_args().only
    for name, lines in TABLES.items():
        if only in (None, name):
            for line in lines():
                print(line, flush=True)
            print()


if __name__ == "__main__":
    main()
