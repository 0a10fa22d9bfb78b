"""Profile a preset on the testbed and print what was found of its links against what they are.

python benchmarks/profile_accuracy.py [--preset laptop] [--model gpt2-tiny] [--max-samples 16]

Emulated: links (a router shapes real TCP between network namespaces) and devices' time. Real: transport, measuring.
Bounds of the project: estimates within 5 % of the testbed's rates and delays; the laptop preset in under 40 s;
a round of the network of 22 devices (spantrain-setting-1) in under 60 s.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from spantrain.config.cluster_file import load_preset

BOUND = 0.05
COMMAND_BOUND_S = {"laptop": 40.0}
NETWORK_BOUND_S = {"spantrain-setting-1": 60.0}


def _profile(options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Run the command; return what it says, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["profile", "--preset", options.preset, "--model", options.model, "--out", folder]
        started_s = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-m", "spantrain", *command, "--fresh", "--json", "--max-samples", options.max_samples],
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(result.stdout), time.monotonic() - started_s


def main() -> int:
    """Profile, compare, print; return 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="laptop")
    parser.add_argument("--model", default="gpt2-tiny")
    parser.add_argument("--max-samples", default="16")
    options = parser.parse_args()
    cluster = load_preset(options.preset)
    found, took_s = _profile(options)
    ratios: dict[str, dict[str, list[float]]] = {}
    for link in found["links"]:
        source, target = (cluster.device_by_name[link[end]] for end in ("source", "target"))
        if source.site == target.site:
            continue  # inside a site the testbed has a rate, but no delay of its own
        truth = cluster.link(source.name, target.name)
        entry = ratios.setdefault(f"{source.site} -> {target.site}", {"rate": [], "delay": []})
        entry["rate"].append(link["bandwidth_bytes_per_s"] / truth.bandwidth_bytes_per_s)
        entry["delay"].append(link["latency_s"] / truth.latency_s)
    print(f"{'found over true':22} {'rate: median, worst':>22} {'delay: median, worst':>22}")
    worst = 0.0
    for name, entry in sorted(ratios.items()):
        cells = []
        for values in entry.values():
            far = max(values, key=lambda value: abs(value - 1))
            worst = max(worst, abs(far - 1))
            cells.append(f"{statistics.median(values):.3f}, {far:.3f}")
        print(f"{name:22} {cells[0]:>22} {cells[1]:>22}")
    print(f"worst error {worst:.1%}, bound {BOUND:.0%}: {'holds' if worst <= BOUND else 'does not hold'}")
    print(
        f"compute {found['compute_s']:.1f} s, a round of the network {found['network_s']:.1f} s, "
        f"the whole command {took_s:.1f} s"
    )
    good = worst <= BOUND
    for what, took, bounds in (("command", took_s, COMMAND_BOUND_S), ("network", found["network_s"], NETWORK_BOUND_S)):
        if (bound_s := bounds.get(options.preset)) is not None:
            print(f"{what}: {took:.1f} s, bound {bound_s:.0f} s: {'holds' if took <= bound_s else 'does not hold'}")
            good = good and took <= bound_s
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
