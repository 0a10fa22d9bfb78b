"""What no method of a comparison can pass, by its devices and links as they are emulated."""

from dataclasses import replace

from spantrain.core.action import SPLIT_OPS
from spantrain.core.cluster import Cluster, Device
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.units import UnitGraph
from spantrain.cost.compute import ComputeCost
from spantrain.planner.engine.predict import costs_of
from spantrain.sim.bounds import step_bound_s
from spantrain_studies.comparison.figures import ComparisonBounds


def bounds_of(profile: Profile, global_batch: int, plan: Plan | None, *, shaped: bool = True) -> ComparisonBounds:
    """Return the bounds of a setting; with a plan, also that of its own work under any order (`sim.bounds`).

    Args:
        profile: by data sheets, which emulated devices and links follow; what was measured on a busy machine would
            make no bounds. What real devices could do at most nobody knows, so theirs is none.
        global_batch: samples of a step.
        plan: the one chosen.
        shaped: whether links have the rates that the cluster says.
    """
    cluster, graph = profile.cluster, profile.graph
    crossing = shaped and len(cluster.sites) > 1 and bool(cluster.links)
    bounds = ComparisonBounds(
        link_data_parallel=_through_links(cluster, global_batch, graph.trained_bytes) if crossing else None,
        link_pipeline=_through_links(cluster, global_batch, global_batch * _smallest_cut(graph)) if crossing else None,
        latency=global_batch / _farthest_s(cluster) if crossing else None,
    )
    if not all(device.emulated for device in cluster.devices):
        return bounds
    compute = ComputeCost(profile, profile.dtype)
    rates = {device.name: _most_samples_per_s(compute, graph, device, global_batch) for device in cluster.devices}
    by_plan = None if plan is None or not shaped else global_batch / step_bound_s(plan, costs_of(plan, profile))
    return replace(
        bounds,
        compute=sum(rates.values()),
        compute_best_site=max(sum(rates[d.name] for d in cluster.devices_at(site.name)) for site in cluster.sites),
        chosen_plan=by_plan,
    )


def _most_samples_per_s(compute: ComputeCost, graph: UnitGraph, device: Device, global_batch: int) -> float:
    units = range(len(graph.units))
    return global_batch / sum(compute.kind_seconds(units, device.kind, op, global_batch) for op in SPLIT_OPS)


def _through_links(cluster: Cluster, global_batch: int, size_bytes: int) -> float:
    """Return samples per second if so much must come to every site in each step, over all links that lead there."""
    slowest = min(
        sum(link.bandwidth_bytes_per_s for link in cluster.links if link.target == site.name) for site in cluster.sites
    )
    return global_batch * slowest / size_bytes


def _farthest_s(cluster: Cluster) -> float:
    """Return the way to the site whose nearest neighbour is the farthest."""
    return max(min(link.latency_s for link in cluster.links if link.target == site.name) for site in cluster.sites)


def _smallest_cut(graph: UnitGraph) -> int:
    """Return the least that crosses a cut for one sample: activations on the way there, gradients on the way back."""
    cuts = ((unit.cut_bytes_per_sample, unit.gradient_bytes_per_sample) for unit in graph.units[:-1])
    sizes = [min(there, back or there) for there, back in cuts]
    return max(1, min(sizes, default=1))
