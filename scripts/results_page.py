"""Make docs/results.md of what benchmarks have left in benchmarks/results/: tables, pictures, when and where.

python scripts/results_page.py [--check]

With --check nothing is written: the exit code says whether the page agrees with the folder.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HEAD = """# Results

Made by `python scripts/results_page.py` of the files that benchmarks write to `benchmarks/results/`; not to be edited.
Each table stands as its benchmark printed it. A commit with `-dirty` had changes that were not committed. Where a
bound is missed, the table says so. Emulated devices took other times before commit 7c62573 (their data sheets' law is
another since, [planner](planner.md#without-measuring)): tables of emulated devices that are older are of those times.
"""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What is to be said of the results whose names begin with `name`."""

    name: str
    title: str
    script: str
    shows: str
    emulated: str


_PIPELINE_EMULATED = "Real: parameters, samples, gradients, rounding. Emulated: the pipeline, within one process."
_TESTBED = "Real: processes, computation, gradients, TCP, encryption. Emulated: the devices' time and the links."
_CLUSTERS = "Real: processes, TCP, ZeroMQ, encryption, master and shards. Emulated: links; inner steps are sleeps."
_POLICIES = "Real: the decisions of master and clients. Simulated: time, links, steps."
BENCHMARKS = (
    Benchmark(
        name="gpu_",
        title="On a GPU",
        script="gpu.py",
        shows="how fast one device trains under SpanTrain, beside a plain PyTorch loop ([what it showed](gpu.md))",
        emulated="Real: the device, computation, gradients, messages, encryption. Emulated: nothing.",
    ),
    Benchmark(
        name="data_sheets",
        title="Data sheets beside devices",
        script="data_sheets.py",
        shows="how far off seconds are that are expected by data sheets alone, beside what others measured on 13 kinds",
        emulated="Nothing is emulated or trained: measurements of others, and of one H100, beside the law.",
    ),
    Benchmark(
        name="interleaved",
        title="Several stages on each device",
        script="interleaved.py",
        shows="our orders beside interleaved 1F1B, ZB-V and ZB-2P in the same memory, and published measurements",
        emulated="Nothing is emulated or trained: steps are simulated with made-up seconds.",
    ),
    Benchmark(
        name="planner_many_sites",
        title="Plans for many sites",
        script="planner_many_sites.py",
        shows="what `auto` plans for 1 to 1,000 sites, beside a bound that no plan is under, and what planning takes",
        emulated="Nothing is emulated or trained: steps are simulated, by data sheets; seconds of planning are real.",
    ),
    Benchmark(
        name="planner_monotone",
        title="More is never worse",
        script="planner_monotone.py",
        shows="whether plans for random pools get worse with more of something",
        emulated="Nothing is emulated or trained: steps are simulated, by data sheets.",
    ),
    Benchmark(
        name="planner_dividing",
        title="Divided tensors on random pools",
        script="planner_dividing.py",
        shows="what it brings plans that devices of a host may divide tensors, and what it costs to look for it",
        emulated="Nothing is emulated or trained: steps are simulated, by data sheets; seconds of planning are real.",
    ),
    Benchmark(
        name="model_graphs",
        title="Measuring large models",
        script="model_graphs.py",
        shows="what it takes to find out what large models hold, without numbers and with them, and where both differ",
        emulated="Nothing is emulated; that most runs have no numbers is what is shown.",
    ),
    Benchmark(
        name="frameworks-",
        title="Beside other frameworks",
        script="frameworks.py",
        shows="the same training by torch's frameworks, by other planners and by ours, in one run on one network",
        emulated=_TESTBED,
    ),
    Benchmark(
        name="adapter_live",
        title="Following the network, live",
        script="adapter.py --live",
        shows="what each adapter makes of a run whose links lose a part of their rate for a while. The run below is "
        "older than the present adapter, and its paper's pipeline has micro-batches of 6 and 8 that nobody tuned; the "
        "simulated runs show how much of its gain that is",
        emulated=_TESTBED,
    ),
    Benchmark(
        name="adapter_simulated",
        title="Following the network, simulated",
        script="adapter.py",
        shows="the same with micro-batches, order and adapter apart, beside the best static choice for each network, "
        "and what cheaper formats would add",
        emulated="Simulated: all of it; unit times are the devices' data sheets'.",
    ),
    Benchmark(
        name="adapter_calm",
        title="Following a calm network",
        script="adapter_calm.py",
        shows="what the adapter costs while nothing happens",
        emulated=_TESTBED,
    ),
    Benchmark(
        name="convergence",
        title="Steps to a target loss",
        script="convergence.py",
        shows="that training over several places takes the steps that one process takes",
        emulated="Real: computation, gradients, losses, messages, encryption. Emulated: the devices' time.",
    ),
    Benchmark(
        name="staleness_throughput",
        title="Steps that overlap: speed",
        script="staleness_throughput.py",
        shows="how much faster steps follow each other with `--staleness 1`",
        emulated=_TESTBED,
    ),
    Benchmark(
        name="staleness",
        title="Steps that overlap: loss",
        script="staleness.py",
        shows="what weights that are one step old (`--staleness 1`) do to the loss, beside the exact mode",
        emulated="All real.",
    ),
    Benchmark(
        name="wire_formats_throughput",
        title="Wire formats: speed over a narrow link",
        script="wire_formats.py throughput",
        shows="how much faster a step is where the link is the limit",
        emulated=_TESTBED,
    ),
    Benchmark(
        name="wire_formats_loss",
        title="Wire formats: loss",
        script="wire_formats.py loss",
        shows="the loss after a fixed number of samples beside float32's, over seeds, and how far chance alone leads",
        emulated=_PIPELINE_EMULATED,
    ),
    Benchmark(
        name="wire_formats_gradients",
        title="Wire formats: gradients",
        script="wire_formats.py gradients",
        shows="how far off the gradients of one step are",
        emulated=_PIPELINE_EMULATED,
    ),
    Benchmark(
        name="wire_formats_encoding",
        title="Wire formats: the processor's part",
        script="wire_formats.py encoding",
        shows="how fast one thread encodes and decodes",
        emulated="All real.",
    ),
    Benchmark(
        name="sharded_state",
        title="State that replicas divide",
        script="sharded_state.py",
        shows="what replicas hold that [divide it](planner.md#state-that-is-divided), and how long a step takes, "
        "beside torch's ZeroRedundancyOptimizer and FSDP2",
        emulated="Real: two processes of one thread, computation, gradients, Gloo over loopback. Emulated: nothing.",
    ),
    Benchmark(
        name="gradient_sums",
        title="Sums over slow links",
        script="gradient_sums.py",
        shows="how long sums of gradients between sites take by our rings, beside Gloo's, and what the cost model says",
        emulated="Real: processes, sums, TCP. Emulated: the links.",
    ),
    Benchmark(
        name="plan_changes",
        title="Changes of plan between steps",
        script="plan_changes.py",
        shows="how long a run stands still when another plan takes over",
        emulated=_TESTBED,
    ),
    Benchmark(
        name="recovery_matrix",
        title="Devices killed at every moment",
        script="recovery.py --matrix",
        shows="how far losses are off those of a run without the fault, for each device and moment",
        emulated="Real: processes, signals, computation, gradients, TCP, encryption. Emulated: the devices' time.",
    ),
    Benchmark(
        name="goodput_live",
        title="Losses all the time, live",
        script="goodput.py --live",
        shows="how much of what the devices present could do is done while workers are killed in turn",
        emulated=_TESTBED,
    ),
    Benchmark(
        name="goodput",
        title="Losses all the time, simulated",
        script="goodput.py",
        shows="what comes of runs whose devices leave and come, beside other systems' policies ([how](recovery.md))",
        emulated="Simulated: time, steps, losses, which are drawn. Measured: the seconds of a restart.",
    ),
    Benchmark(
        name="recovery",
        title="Devices that are lost, leave and come",
        script="recovery.py",
        shows="how long training stands still, beside a stop and a new plan from a checkpoint, and what keepers cost",
        emulated=_TESTBED,
    ),
    Benchmark(
        name="lost_device_rivals",
        title="A lost device, beside torchft and TorchElastic",
        script="lost_device_rivals.py",
        shows="how long a killed device, and its coming back, hold up others, and data parallelism that survives it",
        emulated="Real: processes, computation, gradients, sums, state that moves. Emulated: the devices' time. The "
        "network is loopback, not shaped.",
    ),
    Benchmark(
        name="outer_throughput_simulated",
        title="Clusters that never wait: throughput, simulated",
        script="outer_throughput.py",
        shows="inner steps of ways to train over clusters, by bandwidth and by the clusters' speeds",
        emulated=_POLICIES,
    ),
    Benchmark(
        name="outer_throughput",
        title="Clusters that never wait: throughput, live",
        script="outer_throughput.py --live",
        shows="tokens a second of ways to train over clusters, on one network",
        emulated=_CLUSTERS,
    ),
    Benchmark(
        name="outer_scaling_simulated",
        title="Clusters that never wait: one to seven, simulated",
        script="outer_scaling.py",
        shows="what part of each cluster's own speed is left when there are more of them",
        emulated=_POLICIES,
    ),
    Benchmark(
        name="outer_scaling",
        title="Clusters that never wait: one to seven, live",
        script="outer_scaling.py --live",
        shows="what part of each cluster's own speed is left when there are more of them",
        emulated=_CLUSTERS,
    ),
    Benchmark(
        name="outer_convergence",
        title="Clusters that never wait: what they learn",
        script="outer_convergence.py",
        shows="held-out loss at the same tokens, and with a cluster that sends what is no gradient",
        emulated="Real: parameters, gradients, losses, guard, sums, updates, decisions. Simulated: time.",
    ),
    Benchmark(
        name="outer_options",
        title="Clusters that never wait: options",
        script="outer_options.py",
        shows="what pushes in fewer bytes, delay compensation and weights by staleness do to the held-out loss",
        emulated="Real: parameters, gradients, losses, rounding, sums, updates, decisions. Simulated: time.",
    ),
    Benchmark(
        name="outer_streaming",
        title="Clusters that never wait: a model in fragments, and lines",
        script="outer_streaming.py",
        shows="what lines carry at most, and how long an exchange takes, with the model in fragments",
        emulated="Real: decisions. Simulated: computing, time and lines; nothing is learned.",
    ),
    Benchmark(
        name="outer_shard",
        title="Shards of the outer optimizer",
        script="outer_shard.py",
        shows="rates of pushes, pulls and updates, and what a shard holds",
        emulated="Real: processes, shard servers, TCP, ZeroMQ, encryption, files. Emulated: the shaped link.",
    ),
    Benchmark(
        name="outer_faults",
        title="Faults of clusters, shards and master",
        script="outer_faults.py",
        shows="what happens when one of them is killed in each phase of a round, and when it comes back",
        emulated=_TESTBED,
    ),
)


def render(folder: Path, page: Path) -> str:
    """Return the page; links are written as they work from where it lies."""
    names = sorted(path.stem for path in folder.glob("*.txt"))
    sections = [(benchmark, [name for name in names if _of(name) is benchmark]) for benchmark in BENCHMARKS]
    sections += [(_unknown(folder, name), [name]) for name in names if _of(name) is None]
    way = Path(os.path.relpath(folder, page.parent)).as_posix()
    return "\n".join([_HEAD, *(line for entry in sections if entry[1] for line in _section(folder, way, *entry))])


def _of(name: str) -> Benchmark | None:
    return next((benchmark for benchmark in BENCHMARKS if name.startswith(benchmark.name)), None)


def _unknown(folder: Path, name: str) -> Benchmark:
    """Take what a result says of itself."""
    said = str(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")).get("emulated", ""))
    emulated = f"Emulated: {said.strip().splitlines()[0]}." if said.strip() else "All real."
    return Benchmark(name=name, title=name, script=f"{name}.py", shows="see the script", emulated=emulated)


def _section(folder: Path, way: str, benchmark: Benchmark, names: list[str]) -> Iterator[str]:
    yield f"## {benchmark.title}\n"
    yield f"`benchmarks/{benchmark.script}` shows {benchmark.shows}. {benchmark.emulated}\n"
    for name in names:
        head, _, table = (folder / f"{name}.txt").read_text(encoding="utf-8").partition("\n\n")
        files = [f"[{suffix}]({way}/{name}.{suffix})" for suffix in ("json", "svg") if _exists(folder, name, suffix)]
        yield f"`{name}`: {head.strip()}; {', '.join(files)}\n"
        yield f"```text\n{_trimmed(table)}\n```\n"
        if _exists(folder, name, "svg"):
            yield f"![{name}]({way}/{name}.svg)\n"


def _trimmed(table: str) -> str:
    return "\n".join(line.rstrip() for line in table.strip("\n").splitlines())


def _exists(folder: Path, name: str, suffix: str) -> bool:
    return (folder / f"{name}.{suffix}").exists()


def main() -> int:
    """Write the page or check it; return 1 if it does not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    options = parser.parse_args()
    wanted = render(options.folder, options.page)
    if not options.check:
        options.page.write_text(wanted, encoding="utf-8")
        return 0
    if options.page.exists() and options.page.read_text(encoding="utf-8") == wanted:
        return 0
    sys.stderr.write(f"{options.page} is not what {options.folder} holds; run: python scripts/results_page.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
