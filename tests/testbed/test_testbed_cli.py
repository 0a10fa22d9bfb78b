"""`spantrain testbed`, the commands."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from spantrain.cli.testbed import app
from spantrain.errors import ConfigError, TestbedError


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
        (("exec", "host", "--"), "nothing to run"),
    ],
)
def test_what_is_missing_is_said(arguments: tuple[str, ...], message: str, own_runtime_dir: Path) -> None:
    assert message in str(run(*arguments).exception)
