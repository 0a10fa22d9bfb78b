"""Run the program in this process, and files for it to read."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spantrain.cli.main import main
from spantrain.config.artefacts import write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from testing.plans import over_all_places, written


@dataclass(frozen=True)
class Ended:
    """How a run of the program ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def spantrain(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the program with these words; return exit code and both outputs."""

    def run(*words: object) -> Ended:
        capfd.readouterr()
        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = 0 if end.code is None else int(end.code)
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run


@pytest.fixture(scope="session")
def laptop_profile(law_profile) -> Profile:
    from spantrain.models.catalog.catalog import resolve_model

    return law_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="session")
def profile_path(laptop_profile, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(laptop_profile, path)
    return path


@pytest.fixture(scope="session")
def plan(laptop_profile) -> Plan:
    return over_all_places(laptop_profile)


@pytest.fixture
def plan_path(plan, profile_path, tmp_path) -> Path:
    return written(plan, profile_path, tmp_path / "plan.json")


@pytest.fixture(scope="session")
def tight_profile_path(laptop_profile, tmp_path_factory) -> Path:
    """The same devices with a mebibyte of memory each."""
    cluster = laptop_profile.cluster
    tight = cluster.with_memory(dict.fromkeys(cluster.device_by_name, 2**20))
    path = tmp_path_factory.mktemp("tight") / "profile.json"
    write_profile(replace(laptop_profile, cluster=tight), path)
    return path


@pytest.fixture
def refused(spantrain, tmp_path, monkeypatch):
    """Run in an empty folder; check that the program refuses in one message and writes nothing; return the message."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python itself writes beside what it imports

    def run(*words: object, says: tuple[str, ...]) -> str:
        before = sorted(folder.rglob("*"))
        ended = spantrain(*words)
        assert ended.code == 2, ended.err
        assert ended.out == ""
        assert ended.err.count("Error") == 1, ended.err
        assert "Traceback" not in ended.err
        plain = " ".join(ended.err.replace("│", " ").split())
        for text in says:
            assert text in plain, plain
        assert sorted(folder.rglob("*")) == before, "nothing was written"
        return plain

    return run
