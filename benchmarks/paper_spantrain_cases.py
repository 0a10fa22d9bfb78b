"""The SpanTrain papers' clusters, models and jobs, and who is asked for a plan on them."""

from dataclasses import dataclass, replace
from functools import cache

from paper_rows import OURS, Answer, Contest, Contests, larger_images
from spantrain.app.profiling.describe import described_profile
from spantrain.config.artefacts import shipped_graph
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster
from spantrain.core.profile import Profile
from spantrain.cost.analytic import analytic_profile
from spantrain.models.catalog.catalog import is_text, resolve_model
from spantrain.planner.request import Constraints, JobSpec, PlanRequest, Proposal
from spantrain.planner.strategies.spantrain.strategy import spantrain

SITES = ("cloud", "edge", "end")
OWN = (OURS, "spantrain")
"""Our planners; the better one's plan is shown as ours."""
ENGLISH, CHINESE = ("spantrain", "compact"), ("spantrain-dp", "1f1b")
"""The papers' own systems, as far as they exist here: planner and order of work (the Chinese paper names no order)."""
NO_SECOND = "spantrain without the second level"


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
    kept: bool = False
    """Whether every site must be used."""
    schedule: str = "critical-path"
    """That plans are made for."""

    @property
    def place(self) -> "Case":
        """The same for all who plan: cluster and model."""
        return replace(self, batch=128, kept=False, schedule="critical-path")


def profile_of(case: Case) -> Profile:
    """Return what data sheets and the described network let one expect."""
    return _profile_of(case.place)


@cache
def _profile_of(case: Case) -> Profile:
    cluster = with_cards(load_preset(case.preset))
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


def contest_of(case: Case) -> Contest:
    """Return the contest about a case."""
    return Contest(
        profile=profile_of(case),
        job=JobSpec(global_batch=case.batch, schedule=case.schedule),
        constraints=Constraints(keep=SITES if case.kept else ()),
        contenders={NO_SECOND: without_second_level},
    )


def without_second_level(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose what the strategy `spantrain` does without second-level groups."""
    return spantrain(replace(request, constraints=replace(request.constraints, second_level=False)))


SPANTRAIN = Contests("spantrain", contest_of)


def free(case: Case) -> Contest:
    """Return the contest in which sites may be left out."""
    return SPANTRAIN(case)


def three_sites(case: Case) -> Contest:
    """Return the contest in which every site must be used."""
    return SPANTRAIN(replace(case, kept=True))


def paper_system(case: Case, system: tuple[str, str]) -> Answer:
    """Return what a paper's own system comes to, with all three sites."""
    planner, schedule = system
    return SPANTRAIN(replace(case, kept=True, schedule=schedule)).answer(planner)


def with_cards(cluster: Cluster) -> Cluster:
    """Return the cluster with the cards that presets emulate, so that NCCL carries what they sum."""
    number = {name: place for host in cluster.hosts for place, name in enumerate(host.devices)}
    cards = (replace(device, backend=f"cuda:{number[device.name]}") for device in cluster.devices)
    return replace(cluster, devices=tuple(cards))


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
                devices += [
                    replace(like, name=name, host=own[-1].name, backend=f"cuda:{place}")
                    for place, name in enumerate(names)
                ]
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


def best(case: Case) -> tuple[str, Answer]:
    """Return the better one of our planners, with all three sites, and its answer."""
    answers = {name: three_sites(case).answer(name) for name in OWN}
    return max(answers.items(), key=lambda entry: entry[1].samples_per_s or 0.0)
