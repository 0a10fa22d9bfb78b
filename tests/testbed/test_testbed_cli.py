"""`spantrain testbed`, the commands."""

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from spantrain.cli.commands.faults import app
from spantrain.cli.commands.testbed import sparkline
from spantrain.core.speed import SpeedTrace
from spantrain.errors import ConfigError, TestbedError
from testing.patience import until

CONNECTS = "import socket, sys; sys.exit(socket.socket().connect_ex((sys.argv[1], 9)) != 111)"
"""Ends with 0 if a host's kernel refuses, which it can only do where packets pass."""


def run(*arguments: str, app: typer.Typer = app) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.root
def test_up_shape_status_down(namespaces_or_skip: None, own_runtime_dir: Path) -> None:
    try:
        built = json.loads(run("up", "--preset", "laptop", "--json").stdout)
        assert built["cluster"] == "laptop"
        link = built["links"][0]
        changed = run(
            "shape", link["source"], link["target"], "--rate", "5 Mbit/s", "--loss", "0.01", "--both", "--json"
        )
        links = [
            found
            for found in json.loads(changed.stdout)["links"]
            if {found["source"], found["target"]} == {link["source"], link["target"]}
        ]
        assert [(found["bandwidth_bytes_per_s"], found["loss_ratio"]) for found in links] == [(625e3, 0.01)] * 2
        assert [found["latency_s"] for found in links] == [link["latency_s"]] * 2
        site = link["source"]
        lines = json.loads(run("shape-site", site, "--uplink", "9 Mbit/s", "--json").stdout)["lines"]
        assert [(line["site"], line["way"], line["bandwidth_bytes_per_s"]) for line in lines] == [(site, "up", 1.125e6)]
        assert f"{site} up" in run("status").stdout
        assert run("exec", built["hosts"][0]["host"], "--", "sh", "-c", "exit 3").exit_code == 3
        assert built["id"] in run("status").stdout
        assert isinstance(run("exec", "nowhere", "true").exception, TestbedError)
        assert isinstance(run("shape", link["source"], link["target"], "--rate", "fast").exception, ConfigError)
    finally:
        assert json.loads(run("down", "--json").stdout) == {"down": [built["id"]]}
    assert run("down").stdout == "no testbed was there\n"
    assert not list(own_runtime_dir.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up",), "--preset"),
        (("up", "--preset", "laptop", "--cluster", "x.yaml"), "either"),
        (("shape", "a", "b"), "nothing to change"),
        (("shape-site", "a"), "nothing to change: give --uplink or --downlink"),
        (("shape-site", "a", "--uplink", "1 Mbit/s"), "no testbed is running"),
        (("status",), "no testbed is running"),
        (("follow", "drop-50"), "no testbed is running"),
        (("follow", "drop-50", "--run", "0 s"), "must be more than nothing"),
        (("load", "--from", "a", "--to", "b", "--rate", "fast"), "--rate"),
        (("load", "--from", "a", "--to", "b", "--for", "5"), "--for"),
        (("load", "--from", "a", "--to", "b"), "no testbed is running"),
        (("exec", "host", "--"), "nothing to run"),
        (("partition", "a"), "no testbed is running"),
        (("heal",), "no testbed is running"),
    ],
)
def test_what_is_missing_is_said(arguments: tuple[str, ...], message: str, own_runtime_dir: Path) -> None:
    assert message in str(run(*arguments).exception)


@pytest.mark.root
def test_follow_and_load(namespaces_or_skip: None, own_runtime_dir: Path) -> None:
    try:
        assert run("up", "--preset", "laptop").exit_code == 0
        followed = json.loads(run("follow", "drop-50:from=0s", "--run", "60 s", "--json").stdout)
        assert followed["links"]["lab->home"] == [[0.0, 0.5], [45.0, 1.0]]
        shown = run("follow", "drop-60:from=0s,links=lab->home")
        assert shown.exit_code == 0
        assert "lab->home" in shown.stdout
        speeds = {f"{link['source']}->{link['target']}": link["speed"] for link in status()["links"]}
        assert {name for name, speed in speeds.items() if speed == 0.4} == {"lab->home"}
        words = ("load", "--from", "lab", "--to", "office-nx", "--rate", "4Mbit/s", "--for", "500ms")
        ended = json.loads(run(*words, "--json").stdout)
        assert (ended["source"], ended["target"], ended["asked_bytes_per_s"]) == ("lab-0", "office-nx", 5e5)
        loads = {f"{link['source']}->{link['target']}": link["load_bytes_sent"] for link in status()["links"]}
        assert 0 < ended["received_bytes"] <= loads["lab->office"]
        assert loads["lab->home"] == 0
        assert "Mbit/s of 4 Mbit/s asked for" in run(*words).stdout.replace("kbit/s of", "Mbit/s of")
        assert isinstance(run("load", "--from", "lab", "--to", "moon").exception, TestbedError)
        assert isinstance(run("load", "--from", "lab-0", "--to", "lab-0").exception, TestbedError)
    finally:
        run("down")


def status() -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(run("status", "--json").stdout)
    return found


def test_traces_are_listed_with_a_picture() -> None:
    shown = run("traces").stdout
    for name in ("drop-40", "drop-50", "drop-60", "square", "random-walk", "diurnal", "burst", "outage-30"):
        assert f"\n{name}" in f"\n{shown}"
    assert "█" in shown
    listed = json.loads(run("traces", "--json").stdout)["traces"]
    assert [row["name"] for row in listed][-1] == "outage-30"


def test_a_picture_is_as_high_as_the_mean_speed() -> None:
    speed = SpeedTrace(changes=((2.0, 0.5), (6.0, 0.0), (7.0, 1.0)))
    assert sparkline(speed, 8.0, 8) == "██▄▄▄▄ █"


@pytest.mark.root
def test_sites_are_cut_off_and_healed(namespaces_or_skip: None, own_runtime_dir: Path) -> None:
    def reaches(source: str, target: str) -> bool:
        words = ("timeout", "1", sys.executable, "-ISc", CONNECTS, address[target])
        return run("exec", source, "--", *words).exit_code == 0

    def cut() -> set[tuple[str, str]]:
        return {(link["source"], link["target"]) for link in status()["links"] if link["is_cut"]}

    try:
        built = json.loads(run("up", "--preset", "laptop", "--json").stdout)
        address = {host["host"]: host["address"] for host in built["hosts"]}
        assert json.loads(run("partition", "home", "--json").stdout) == {
            "cut": [["home", "lab"], ["home", "office"], ["lab", "home"], ["office", "home"]]
        }
        assert len(cut()) == 4
        assert "cut" in run("status").stdout
        run("heal", "home", "office")
        assert cut() == {("home", "lab"), ("lab", "home")}
        for words in (("partition", "moon"), ("partition", "home", "home"), ("partition", "home", "home-nano")):
            assert isinstance(run(*words).exception, TestbedError)
        assert not reaches("lab-0", "home-nano")
        assert "all passes again" in run("heal").stdout
        assert cut() == set()
        assert run("heal").stdout == "nothing was cut there\n"
        until(lambda: reaches("lab-0", "home-nano"))
    finally:
        run("down")
