"""`spantrain relay`: two sites that cannot reach each other train through it as if they could."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from spantrain.config.cluster_file import parse_cluster
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from testing.machines import interpreter, ssh_config
from testing.namespaces import inside, three_places
from testing.programs import Program, nothing_is_left, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLUSTER = """
name: two-homes
kinds:
  test-kind:
    {peak_fp16: 1 TFLOP/s, peak_fp32: 1 TFLOP/s, memory: 16 GiB, memory_bandwidth: 100 GB/s, power: 10 W, source: test}
sites:
  - name: lab
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts: [{name: s0r0, backend: cpu, devices: {test-kind: 1}}]
  - name: home
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts: [{name: s1r0, backend: cpu, devices: {test-kind: 1}}]
links: [{between: [lab, home], bandwidth: 100 Mbit/s, latency: 1 ms}]
"""

TOKEN = "t" * 32


@pytest.fixture
def plan_path(tmp_path, make_plan, spec_of, law_profile) -> Path:
    plan: Plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, 2), Span(2, 4)]] * 2, "critical-path")
    return written(replace(plan, cluster=parse_cluster(CLUSTER, source="this test")), law_profile, tmp_path)


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def ended_well(*running: Program) -> None:
    for program in running:
        code, said = program.end()
        assert code == 0, said
        nothing_is_left(program)


@pytest.mark.root
def test_two_sites_that_cannot_reach_each_other_train_as_one(start, plan_path, tmp_path):
    """Both are behind the relay, the coordinator is at one of them, and losses are those of a run on one machine."""
    train = ("train", plan_path, "--steps", "3", "--out")
    relay = ("--relay", "10.77.1.1:9000")
    tokens = tmp_path / "relay.tokens"
    tokens.write_text(f"us {TOKEN}\n")
    tokens.chmod(0o600)
    with three_places(tmp_path, forwards=False) as (a, r, b):
        words = ("--listen", "0.0.0.0:9000", "--ports", "7000-7009", "--token-file", tokens, "--json")
        server = start("relay", *words, before=inside(r))
        known = {"SPANTRAIN_RELAY_TOKEN": TOKEN}
        coordinator = start(*train, tmp_path / "far", "--listen", "10.77.1.2:7000", *relay, before=inside(a), **known)
        coordinator.wait_to_hear("SPANTRAIN_TOKEN=")
        said = "".join(coordinator.said)
        assert "--join 10.77.1.1:7000 " in said
        known["SPANTRAIN_TOKEN"] = re.findall(r"SPANTRAIN_TOKEN=(\w+)", said)[0]
        workers = [
            start("worker", "--join", join, *relay, "--name", name, before=inside(place), **known)
            for name, place, join in (("s0r0", a, "10.77.1.2:7000"), ("s1r0", b, "10.77.1.1:7000"))
        ]
        ended_well(coordinator, *workers)
        server.process.send_signal(signal.SIGINT)
        assert server.end() == (130, "Stopped: the relay was interrupted; nothing was left running\n")
        lines = server.temporary.with_name(f"{server.temporary.name}.out").read_text().splitlines()
    ended_well(start(*train, tmp_path / "near", "--no-network"))
    assert losses(tmp_path / "far") == losses(tmp_path / "near")
    assert len(losses(tmp_path / "far")) == 3
    ready, *news = map(json.loads, lines)
    assert (ready["event"], ready["ports"]) == ("ready", "7000-7009")
    assert {(one["token"], one["origin"], tuple(one["ports"])) for one in news if one["event"] == "left"} >= {
        ("us", "10.77.1.2", (7000, 7001))
    }
    assert len(news) == 6
    assert news[-1]["bytes"] > 10_000


@pytest.mark.root
def test_workers_that_launch_starts_are_given_the_relay(start, plan_path, tmp_path, plain_processes):
    """Their machines cannot reach each other; ssh leads there, as through jump hosts. No command line has the token."""
    tokens, out = tmp_path / "relay.tokens", tmp_path / "far"
    tokens.write_text(f"us {TOKEN}\n")
    tokens.chmod(0o600)
    with three_places(tmp_path, forwards=False) as (a, r, b):
        server = start(
            "relay", "--listen", "0.0.0.0:9000", "--ports", "7000-7009", "--token-file", tokens, before=inside(r)
        )
        config = ssh_config(tmp_path, {"s0r0": inside(a), "s1r0": inside(b)})
        relay = ("--relay", "10.77.1.1:9000")
        program = start(
            "launch", "--ssh", "--option", f"-F {config}", "--python", interpreter(tmp_path), *relay, "--",
            "train", plan_path, "--steps", "3", "--out", out, "--listen", "10.77.1.2:7000", *relay,
            before=inside(a), SPANTRAIN_RELAY_TOKEN=TOKEN,
        )  # fmt: skip
        program.wait_to_hear("has joined, 2 of 2")
        lines = [words for one in psutil.process_iter(["cmdline"]) if (words := one.info["cmdline"])]
        assert [words for words in lines if any(TOKEN in word for word in words)] == []
        assert sum("--relay" in words and "worker" in words for words in lines) == 2
        ended_well(program)
        server.process.send_signal(signal.SIGINT)
        server.end()
        news = server.temporary.with_name(f"{server.temporary.name}.out").read_text()
    assert len(losses(out)) == 3
    assert "us: 10.77.2.2 has joined, port 7009" in news or "us: 10.77.2.2 has joined, port 7008" in news
    assert TOKEN not in "".join(path.read_text() for path in (out / "logs").iterdir())
