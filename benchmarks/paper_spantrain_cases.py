"""The SpanTrain papers' clusters, models and jobs, and who is asked for a plan on them."""

from dataclasses import dataclass, replace
from functools import cache

from paper_rows import OURS, Answer, Contest, larger_images
from spantrain.app.describe import described_profile
from spantrain.config.graphs import shipped_graph
from spantrain.config.presets import load_preset
from spantrain.core.cluster import Cluster
from spantrain.core.profile import Profile
from spantrain.cost.analytic import analytic_profile
from spantrain.models.catalog import is_text, resolve_model
from spantrain.planner.job import JobSpec
from spantrain.planner.request import Constraints

__all__ = ["Case", "best", "free", "profile_of", "three_sites"]

SITES = ("cloud", "edge", "end")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster, a model and a job of the papers."""

    preset: str
    model: str
    batch: int = 128
    pixels: int = 1
    """Over those of 32 x 32 images."""
    servers: int | None = None
    """Edge hosts and end hosts of figure 13; None: as in the preset."""
    least_bytes_per_s: float = 0.0
    """Rate that no link is under, for what-ifs."""


@cache
def profile_of(case: Case) -> Profile:
    """Return what data sheets and the described network let one expect."""
    cluster = load_preset(case.preset)
    if case.servers is not None:
        cluster = with_servers(cluster, case.servers)
    if case.least_bytes_per_s:
        cluster = faster(cluster, case.least_bytes_per_s)
    model = resolve_model(case.model)
    if is_text(model):
        model = resolve_model(case.model, sequence_length=512)
    elif case.pixels > 1:
        graph = shipped_graph(model, "float32")
        assert graph is not None, f"{case.model} ships"
        return analytic_profile(cluster, model, larger_images(graph, case.pixels))
    return described_profile(cluster, model)


@cache
def free(case: Case) -> Contest:
    """Return the contest in which sites may be left out."""
    return Contest(profile=profile_of(case), job=JobSpec(global_batch=case.batch))


@cache
def three_sites(case: Case) -> Contest:
    """Return the contest in which every site must be used."""
    kept = Constraints(keep=SITES)
    return Contest(profile=profile_of(case), job=JobSpec(global_batch=case.batch), constraints=kept)


def with_servers(cluster: Cluster, count: int) -> Cluster:
    """Return the cluster with so many edge hosts and end hosts (copies of the first of each)."""
    hosts, devices, sites = [], [], []
    for site in cluster.sites:
        first = cluster.host_by_name[site.hosts[0]]
        if site.name == "cloud":
            own = [cluster.host_by_name[name] for name in site.hosts]
            devices += [cluster.device_by_name[name] for host in own for name in host.devices]
        else:
            own = []
            for number in range(count):
                names = tuple(f"{site.name}-{number}-{index}" for index in range(len(first.devices)))
                own.append(replace(first, name=f"{site.name}-{number}", devices=names))
                like = cluster.device_by_name[first.devices[0]]
                devices += [replace(like, name=name, host=own[-1].name) for name in names]
        hosts += own
        sites.append(replace(site, hosts=tuple(host.name for host in own)))
    return replace(cluster, hosts=tuple(hosts), devices=tuple(devices), sites=tuple(sites))


def faster(cluster: Cluster, least_bytes_per_s: float) -> Cluster:
    """Return the cluster with no link or site network under a rate."""
    return replace(
        cluster,
        links=tuple(
            replace(link, bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s, least_bytes_per_s))
            for link in cluster.links
        ),
        sites=tuple(
            replace(site, bandwidth_bytes_per_s=max(site.bandwidth_bytes_per_s, least_bytes_per_s))
            for site in cluster.sites
        ),
    )


def best(case: Case) -> Answer:
    """Return the better one of our default and of `spantrain`, with all three sites."""
    answers = (three_sites(case).answer(OURS), three_sites(case).answer("spantrain"))
    return max(answers, key=lambda answer: answer.samples_per_s or 0.0)
