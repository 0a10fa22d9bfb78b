"""A made-up profile of three sites: a lab with two hosts, an office and a home with one each, one device per host."""

from collections.abc import Mapping
from itertools import permutations

from spantrain.core.cluster import Cluster, Device, Host, Link, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile, UnitTiming
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from testing.plans import KIND
from testing.profiles import PROVENANCE, exact_links

SITE_OF = {"a": "lab", "b": "lab", "c": "office", "d": "home"}
SITES = ("lab", "office", "home")
RATE, LATENCY_S = 100.0, 0.5
"""Of every link between sites; inside one it is ten times as fast."""
CUT_BYTES = 20
_MODEL = ModelSpec(name="tiny", family="made up", config={}, dataset="stdlib-text")


def sites_cluster(rates: Mapping[tuple[str, str], float] | None = None, **lines: float) -> Cluster:
    """Lines as `lab_up=50.0`; `rates` of links that are not like the others."""
    given = rates or {}
    return Cluster(
        name="three sites",
        kinds=(KIND,),
        sites=tuple(
            Site(
                name=site,
                hosts=tuple(f"h{name}" for name in SITE_OF if SITE_OF[name] == site),
                bandwidth_bytes_per_s=10 * RATE,
                latency_s=0.1,
                uplink_bandwidth_bytes_per_s=lines.get(f"{site}_up"),
                downlink_bandwidth_bytes_per_s=lines.get(f"{site}_down"),
            )
            for site in SITES
        ),
        hosts=tuple(Host(name=f"h{name}", site=site, devices=(name,)) for name, site in SITE_OF.items()),
        devices=tuple(
            Device(name=name, kind=KIND.name, host=f"h{name}", site=site, backend="emulated", memory_bytes=10**6)
            for name, site in SITE_OF.items()
        ),
        links=tuple(
            Link(source=x, target=y, bandwidth_bytes_per_s=given.get((x, y), RATE), latency_s=LATENCY_S)
            for x, y in permutations(SITES, 2)
        ),
    )


def sites_profile(cluster: Cluster, *, measured: bool = True) -> Profile:
    """One pair measured at a time, exactly; or described only."""
    return Profile(
        cluster=cluster,
        model=_MODEL,
        graph=UnitGraph(units=tuple(map(_unit, ("u0", "u1"))), shared_bytes={}),
        dtype="float32",
        timings=tuple(map(_timing, ("u0", "u1"))),
        links=exact_links(cluster) if measured else (),
        links_described=not measured,
        scores=(),
        provenance=PROVENANCE,
    )


def two_stages(cluster: Cluster, first: str, second: str) -> Plan:
    """Two stages of one unit; each letter is a replica with an equal share, eight samples in micro-batches of two."""
    stages = tuple(
        Stage(
            first_unit=index,
            end_unit=index + 1,
            replicas=tuple(Replica(devices=(name,), sample_share=1.0, in_flight_limit=8) for name in names),
            micro_batches=equal_spans(8, 2),
        )
        for index, names in enumerate((first, second))
    )
    return Plan(cluster=cluster, model=_MODEL, global_batch=8, dtype="float32", stages=stages, schedule="critical-path")


def _unit(name: str) -> Unit:
    hidden = TensorSpec(name="hidden", shape_per_sample=(5,), dtype="float32", bytes_per_sample=CUT_BYTES)
    return Unit(
        name=name,
        unit_class=name,
        parameter_bytes=60,
        forward_flop_per_sample=1.0,
        outputs=(hidden,),
        activation_bytes_per_sample=CUT_BYTES,
    )


def _timing(name: str) -> UnitTiming:
    return UnitTiming(
        unit_class=name,
        kind=KIND.name,
        dtype="float32",
        samples=1,
        forward_s=0.01,
        backward_input_s=0.01,
        backward_weight_s=0.01,
    )
