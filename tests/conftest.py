"""What tests of several layers share: how long to wait, how examples are drawn, a profile that needs no measuring.

No test may depend on how fast or how evenly the machine runs: what is measured in seconds belongs into benchmarks/.
A time limit in a test is only there to end one that hangs: PATIENCE_S (testing/patience.py), many times what is needed.

Examples are the same in every run, so that a change is never refused for an example that has nothing to do with it;
`pytest --hypothesis-profile=search` looks for new ones.
"""

import gc
import os
from collections.abc import Callable, Generator

import pytest
from hypothesis import HealthCheck, settings

import preloaded
from spantrain.core.action import Op
from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan
from spantrain.core.profile import DeviceScore, Profile, UnitTiming
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.cost.analytic import AnalyticLaw
from testing import backend
from testing.plans import plan_of
from testing.profiles import PROVENANCE, exact_links

settings.register_profile(
    "steady", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")

preloaded.install()
os.environ.pop("COLUMNS", None)  # xdist gives the width of its own terminal
gc.disable()  # what is collected stays: looking through it again and again would take a seventh of all time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="cpu", help="what the runtime's tests compute on: cpu, cuda:0, late")


def pytest_configure(config: pytest.Config) -> None:
    backend.choose(config.getoption("--backend"))
    if getattr(config.option, "numprocesses", None):
        gc.enable()  # this process collects no tests
        config.option.loadscopereorder = False  # files go to test workers as they are sorted here
        preloaded.start()  # one for all test workers


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """No test has examples in its docstrings, and to look for them takes long."""
    found = yield
    return [one for one in found if type(one) is pytest.Module]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where test workers share the work, files with slow tests come first: nobody waits for one of them at the end."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)  # rarely: a run is short, and nothing in it needs much memory
    gc.enable()


SIZES = (1, 2, 4, 8, 16, 32)


def profile_by_law(cluster: Cluster, model: ModelSpec, dtype: str = "float32") -> Profile:
    """The profile that emulated devices of this cluster have by the law of their kinds, on links as described."""
    from testing.models.graphs import graph_of  # torch and transformers, for those who ask

    graph = graph_of(model)
    return Profile(
        cluster=cluster,
        model=model,
        graph=graph,
        dtype=dtype,
        timings=_timings(cluster, graph, dtype),
        links=exact_links(cluster),
        scores=tuple(
            DeviceScore(
                device=d.name, score=cluster.kind_by_name[d.kind].peak_fp32_flop_per_s / 1e12, task_s={"law": 1.0}
            )
            for d in cluster.devices
        ),
        provenance=PROVENANCE,
    )


def _timings(cluster: Cluster, graph: UnitGraph, dtype: str) -> tuple[UnitTiming, ...]:
    by_class = {unit.unit_class: unit for unit in graph.units}
    laws = [AnalyticLaw(kind=kind, speed=cluster.emulated_speed, dtype=dtype) for kind in cluster.kinds]
    return tuple(
        UnitTiming(
            unit_class=name,
            kind=law.kind.name,
            dtype=dtype,
            samples=samples,
            forward_s=law.seconds(unit, Op.FORWARD, samples),
            backward_input_s=law.seconds(unit, Op.BACKWARD_INPUT, samples),
            backward_weight_s=law.seconds(unit, Op.BACKWARD_WEIGHT, samples),
        )
        for name, unit in by_class.items()
        for law in laws
        for samples in SIZES
    )


@pytest.fixture(scope="session")
def law_profile() -> Callable[..., Profile]:
    return profile_by_law


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return plan_of


@pytest.fixture
def plain_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes are started as users start them: for tests that look at their command lines or environments."""
    monkeypatch.setenv(preloaded.ADDRESS, "")
