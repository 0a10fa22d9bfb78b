"""Who the machines are, as people and schedulers name them."""

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.app.machines.describe import described_cluster
from spantrain.app.reporter import SilentReporter
from spantrain.config.cluster_file import parse_cluster
from spantrain.config.cluster_text import cluster_text
from spantrain.core.cluster import Host
from spantrain.errors import ConfigError, UsageError
from spantrain.reach.allocations import (
    host_machines,
    inventory_machines,
    kubernetes_machines,
    named_machines,
    node_names,
    slurm_machines,
)
from testing.machines import machine, tool

STEM = st.text("abcxyz-", min_size=1, max_size=4).filter(lambda text: text[0] != "-")


@st.composite
def short_forms(draw):
    """A list of Slurm's and the nodes that it stands for."""
    parts, nodes = [], []
    for _ in range(draw(st.integers(1, 3))):
        text, names = draw(STEM), [""]
        names = [text]
        for _ in range(draw(st.integers(0, 2))):
            width, ranges, numbers = draw(st.integers(1, 4)), [], []
            for _ in range(draw(st.integers(1, 3))):
                first = draw(st.integers(0, 10**width - 1))
                last = min(first + draw(st.integers(0, 3)), 10**width - 1)
                ranges.append(f"{first:0{width}}-{last:0{width}}" if last > first else f"{first:0{width}}")
                numbers += [f"{number:0{width}}" for number in range(first, last + 1)]
            tail = draw(st.sampled_from(["", "x", "-ib"]))
            text += f"[{','.join(ranges)}]{tail}"
            names = [f"{name}{number}{tail}" for name in names for number in numbers]
        parts.append(text)
        nodes += names
    return ",".join(parts), nodes


@given(short_forms())
def test_slurms_short_form_is_spelt_out(pair):
    text, nodes = pair
    assert list(node_names(text)) == nodes


@pytest.mark.parametrize("text", ["gpu[1-", "gpu[5-1]", "gpu[1-99999]", "a b", "gpu[]", "[", "gpu[1-2]]", "x[1-1-2]"])
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(UsageError):
        list(node_names(text))


def test_a_job_must_be_there_and_of_a_size():
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST is not set"):
        slurm_machines(None, python="python3")
    with pytest.raises(UsageError, match="1025 machines"):
        slurm_machines("a[0-999]b[0-999]", python="python3")
    first, second = slurm_machines("gpu[07-08]", python="py")
    assert (first.name, first.way, first.target, first.python) == ("gpu07", "slurm", "gpu07", "py")
    assert second.target == "gpu08"


def test_machines_are_named_after_their_hosts():
    names = named_machines(["me@lab1.example.org", "lab1", "10.0.0.7", "ssh://root@x:2222", "a_b"], "ssh", python="p")
    assert [one.name for one in names] == ["lab1", "lab1-2", "10.0.0.7", "x", "a_b"]
    here, lab = named_machines(["localhost", "lab1"], "ssh", python="p")
    assert (here.way, here.python, lab.way) == ("local", sys.executable, "ssh")
    with pytest.raises(UsageError, match="0 machines"):
        named_machines([" "], "ssh", python="p")
    with pytest.raises(UsageError, match="cannot be reached by ssh"):
        named_machines(["-oProxyCommand=x"], "ssh", python="p")


def test_an_inventory_says_more_of_machines(tmp_path):
    path = tmp_path / "hosts.yaml"
    path.write_text("- lab1\n- {ssh: me@10.0.0.7, name: desk, site: home, python: ~/env/bin/python}\n")
    lab, desk = inventory_machines(path, python="python3")
    assert (lab.name, lab.site, lab.python) == ("lab1", None, "python3")
    assert (desk.name, desk.target, desk.site, desk.python) == ("desk", "me@10.0.0.7", "home", "~/env/bin/python")
    path.write_text("- lab1\n- {ssh: other, name: lab1}\n")
    with pytest.raises(ConfigError, match=r"hosts\.yaml: two machines are called lab1"):
        inventory_machines(path, python="python3")
    path.write_text("- {name: desk}\n- [a]\n")
    with pytest.raises(ConfigError, match="2 problems"):
        inventory_machines(path, python="python3")


def test_pods_that_run_are_machines(tmp_path, monkeypatch):
    pods = [
        {"metadata": {"name": f"w-{n}"}, "status": {"phase": phase}} for n, phase in enumerate(["Running", "Pending"])
    ]
    words = tmp_path / "words"
    tool(tmp_path, "kubectl", f"echo \"$@\" > {words}\ncat <<'E'\n{json.dumps({'items': [*pods, {}, 3]})}\nE")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (pod,) = kubernetes_machines("lab", "app=spantrain", python="python3")
    assert words.read_text() == "--namespace lab get pods --output=json --selector=app=spantrain\n"
    assert (pod.way, pod.target, pod.options) == ("kubernetes", "w-0", ("--namespace", "lab"))
    tool(tmp_path, "kubectl", "echo 'error: You must be logged in to the server' >&2; exit 1")
    with pytest.raises(UsageError, match="You must be logged in"):
        kubernetes_machines("lab", None, python="python3")


def test_hosts_of_a_cluster_are_reached_at_their_addresses():
    def host(name, address):
        return Host(name=name, site="s", devices=(), address=address)

    far, near, unnamed = host_machines(
        [host("far", "192.0.2.250"), host("me", "127.0.0.1"), host("n", None)], python="p"
    )
    assert (far.name, far.way, far.target) == ("far", "ssh", "192.0.2.250")
    assert near.way == "local"
    assert (unnamed.way, unnamed.target) == ("ssh", "n")


def test_an_inventorys_interpreter_goes_with_its_host_by_the_cluster_file(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text("- {ssh: me@192.0.2.7, name: desk, python: ~/env/bin/python}\n- {ssh: lab1, name: lab}\n")
    machines = inventory_machines(path, python="python3")
    found = [replace(machine(one.name), machine=one) for one in machines]
    described = described_cluster(found, name="c", measure=False, reporter=SilentReporter()).cluster
    cluster = parse_cluster(cluster_text(described), source="cluster.yaml")
    assert cluster.hosts == described.hosts
    assert [one.python for one in host_machines(cluster.hosts)] == ["~/env/bin/python", "python3"]
    assert [one.python for one in host_machines(cluster.hosts, python="p")] == ["p", "p"]


def test_a_host_of_this_machines_name_is_here_unless_ssh_is_said(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "desk-that-no-table-knows.example")
    host = Host(name="desk-that-no-table-knows", site="s", devices=())
    (here,) = host_machines([host], python="p")
    (by_ssh,) = host_machines([replace(host, ssh="me@desk")], python="p")
    assert (here.way, by_ssh.way, by_ssh.target) == ("local", "ssh", "me@desk")
