"""Clusters for the testbed's tests, and the reason to skip where it cannot run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.testbed.testbed import Testbed, why_unavailable

LATENCY_S = 0.02


def make_cluster(*, links: tuple[Link, ...] | None = None) -> Cluster:
    """Two sites with two hosts each, 100 Mbit/s and 20 ms between them."""
    sites = ("cloud", "edge")
    between = tuple(
        Link(source=source, target=target, bandwidth_bytes_per_s=12.5e6, latency_s=LATENCY_S)
        for source in sites
        for target in sites
        if source != target
    )
    return Cluster(
        name="two sites",
        kinds=(),
        devices=(),
        sites=tuple(
            Site(name=name, hosts=(f"{name}-0", f"{name}-1"), bandwidth_bytes_per_s=1.25e8, latency_s=1e-4)
            for name in sites
        ),
        hosts=tuple(Host(name=f"{site}-{number}", site=site, devices=()) for site in sites for number in (0, 1)),
        links=between if links is None else links,
    )


@pytest.fixture
def cluster() -> Cluster:
    return make_cluster()


@pytest.fixture
def own_runtime_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of the test's own, so that other testbeds of this user are left alone."""
    path = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path / "spantrain"


@pytest.fixture(scope="session")
def namespaces_or_skip() -> None:
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def testbed(namespaces_or_skip: None, own_runtime_dir: Path) -> Iterator[Testbed]:
    with Testbed.up(make_cluster()) as running:
        yield running
