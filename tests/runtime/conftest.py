"""Small models, random plans over them, and one process's own way, for tests of the runtime."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st

from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units
from spantrain.models.units import parameter_names, tie_parameters
from spantrain.schedule.layout import CutLayout, minimum_in_flight
from spantrain.schedule.registry import schedule_names
from testing.backend import backend
from testing.models.small import small_spec
from testing.programs import Program, programs
from testing.runtime.places import BATCH, THIRDS

KIND = DeviceKind(
    name="test-kind",
    peak_fp16_flop_per_s=1e12,
    peak_fp32_flop_per_s=1e12,
    memory_bytes=2**34,
    memory_bandwidth_bytes_per_s=1e11,
    power_w=10.0,
    source="a test",
)


def cluster_of(names: list[str]) -> Cluster:
    """One host with real devices."""
    return Cluster(
        name="test",
        kinds=(KIND,),
        sites=(Site(name="here", hosts=("one",), bandwidth_bytes_per_s=1e9, latency_s=0.0),),
        hosts=(Host(name="one", site="here", devices=tuple(names)),),
        devices=tuple(
            Device(name=name, kind=KIND.name, host="one", site="here", backend=backend(), memory_bytes=2**34)
            for name in names
        ),
        links=(),
    )


def plan_of(
    spec: ModelSpec, unit_edges: list[int], shares: list[list[int]], spans: list[list[Span]], schedule: str
) -> Plan:
    """A plan with limits that hold a whole batch."""
    total = max(span.hi for span in spans[0])
    names = [f"s{stage}r{index}" for stage, row in enumerate(shares) for index in range(len(row))]
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=tuple(
                Replica(devices=(f"s{stage}r{index}",), sample_share=float(share), in_flight_limit=total)
                for index, share in enumerate(shares[stage])
            ),
            micro_batches=tuple(spans[stage]),
        )
        for stage, (first, end) in enumerate(pairwise(unit_edges))
    )
    return Plan(
        cluster=cluster_of(names),
        model=spec,
        global_batch=total,
        dtype="float32",
        stages=stages,
        schedule=schedule,
        generation=1,
    )


def with_limits(plan: Plan, slack: int) -> Plan:
    """The plan with in-flight limits as small as can run, and some more."""
    needed = minimum_in_flight(CutLayout.of(plan))
    stages = tuple(
        replace(
            stage,
            replicas=tuple(
                replace(replica, in_flight_limit=max(1, min(plan.global_batch, needed[index][number] + slack)))
                for number, replica in enumerate(stage.replicas)
            ),
        )
        for index, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages)


@st.composite
def random_spans(draw: st.DrawFn, total: int) -> list[Span]:
    inner = draw(st.lists(st.integers(1, total - 1), max_size=4, unique=True))
    return [Span(lo, hi) for lo, hi in pairwise(sorted({0, total, *inner}))]


@st.composite
def random_plans(draw: st.DrawFn, families: tuple[str, ...]) -> Plan:
    """Random cuts, shares, spans, limits and schedules."""
    spec = small_spec(draw(st.sampled_from(families)), layers=3)
    count = len(build_units(spec, seed=0))
    total = draw(st.integers(2, 9))
    inner = draw(st.lists(st.integers(1, count - 1), max_size=3, unique=True))
    edges = sorted({0, count, *inner})
    shares = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)) for _ in range(len(edges) - 1)]
    spans = [draw(random_spans(total)) for _ in range(len(edges) - 1)]
    plan = plan_of(spec, edges, shares, spans, draw(st.sampled_from(schedule_names())))
    if plan.schedule in ("compact", "critical-path"):
        plan = with_limits(plan, draw(st.sampled_from([0, 1, total])))
    return plan


def single_process(spec: ModelSpec, seed: int) -> tuple[list[torch.nn.Module], dict[str, torch.nn.Parameter]]:
    """All units with their shared parameters tied, and the parameters by the unsplit model's names."""
    units = build_units(spec, seed=seed)
    tie_parameters(units)
    named: dict[str, torch.nn.Parameter] = {}
    for unit in units:
        for local, full in parameter_names(unit).items():
            named[full] = unit.get_parameter(local)
    return list(units), named


@pytest.fixture(scope="session")
def reference() -> Callable[..., tuple[list[torch.nn.Module], dict[str, torch.nn.Parameter]]]:
    return single_process


@pytest.fixture(scope="session")
def spec_of() -> Callable[[str], ModelSpec]:
    return partial(small_spec, layers=3)


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return plan_of


@pytest.fixture(scope="session")
def plans() -> Callable[..., st.SearchStrategy[Plan]]:
    return random_plans


@pytest.fixture
def start(tmp_path_factory) -> Iterator[Callable[..., Program]]:
    """Starts `spantrain` as a user does; nothing of it outlives the test."""
    with programs(tmp_path_factory.mktemp) as run:
        yield run


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def four(make_plan, spec_of):
    """Plans of the same four devices: (edges, groups by stage and replica, micro-batches, schedule) -> plan."""

    def plan(edges, groups, spans=THIRDS, schedule="1f1b", family="gpt2") -> Plan:
        spec = spec_of(family)
        names = {name for stage in groups for replica in stage for name in replica}
        first = make_plan(spec, [0, edges[-1]], [[1]], [list(THIRDS)], schedule)
        host = replace(first.cluster.hosts[0], devices=tuple(sorted(names)))
        devices = tuple(replace(first.cluster.devices[0], name=name) for name in sorted(names))
        stages = tuple(
            Stage(
                first_unit=edges[index],
                end_unit=edges[index + 1],
                replicas=tuple(
                    Replica(
                        devices=tuple(replica),
                        sample_share=1.0 + number,
                        in_flight_limit=BATCH,
                        tp_shares=tuple(float(rank + 1) for rank in range(len(replica))),
                    )
                    for number, replica in enumerate(stage)
                ),
                micro_batches=tuple(spans),
            )
            for index, stage in enumerate(groups)
        )
        cluster = replace(first.cluster, hosts=(host,), devices=devices)
        return replace(first, cluster=cluster, stages=stages)

    return plan
