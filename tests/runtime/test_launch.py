"""`spantrain launch --ssh`: a real run on hosts that are reached by ssh, and what is left of it."""

import re
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from spantrain.app.training.recovery.journal import credentials_in
from spantrain.cli.main import main
from spantrain.config.cluster_file import parse_cluster
from spantrain.core.span import Span
from spantrain.transport.control.credentials import Credentials
from testing.machines import interpreter, ssh_config, tool, workers
from testing.patience import PATIENCE_S, until
from testing.programs import nothing_is_left, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLUSTER = """
name: by-ssh
kinds:
  test-kind:
    {peak_fp16: 1 TFLOP/s, peak_fp32: 1 TFLOP/s, memory: 16 GiB, memory_bandwidth: 100 GB/s, power: 10 W, source: test}
sites:
  - name: lab
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: s0r0, ssh: s0r0, address: 192.0.2.7, backend: cpu, devices: {test-kind: 1}}
      - {name: s1r0, ssh: other-name, backend: cpu, devices: {test-kind: 1}}
      - {name: s1r1, address: 127.0.0.1, backend: cpu, devices: {test-kind: 1}}
"""


@pytest.fixture
def plan_path(tmp_path, make_plan, spec_of, law_profile) -> Path:
    """Two stages, of which the second has two replicas."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1, 1]], [[Span(0, 2), Span(2, 4)]] * 2, "critical-path")
    plan = replace(plan, cluster=parse_cluster(CLUSTER, source="this test"))
    return written(plan, law_profile, tmp_path)


def test_a_dry_run_writes_what_joins_the_run_that_follows(plan_path, tmp_path, capfd):
    """The token that was written is that of the coordinator which is started later in the same folder."""
    out = tmp_path / "run"
    words = ("--slurm", "--dry-run", "--", "train", plan_path, "--out", out, "--listen", "127.0.0.1:7000")
    with pytest.raises(SystemExit) as ended:
        main(["launch", *map(str, words)])
    assert ended.value.code == 0
    said = capfd.readouterr()
    assert said.out.endswith(f"spantrain train {plan_path} --out {out} --listen 127.0.0.1:7000\n")
    assert f"start it with: sbatch --parsable {out}/launch/lab.sbatch" in said.err
    token = Credentials.kept_in(credentials_in(out)).token.text
    assert (out / "launch" / "token.env").read_text() == f"SPANTRAIN_JOIN=127.0.0.1:7000\nSPANTRAIN_TOKEN={token}\n"


def test_workers_that_ended_while_their_coordinator_stood_still_are_started_again(
    start, make_plan, spec_of, law_profile, tmp_path
):
    """As where the machine sleeps that launched them: they end, for none of them is to outlive a launch."""
    cache, out, code = tmp_path / "cache", tmp_path / "run", tmp_path / "code"
    code.mkdir()
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, 2), Span(2, 4)]] * 2, "critical-path")
    two = "".join(line for line in CLUSTER.splitlines(keepends=True) if "s1r1" not in line)
    here = re.sub(r"(name: s\w+), .*backend", r"\1, address: 127.0.0.1, backend", two)
    plan_path = written(replace(plan, cluster=parse_cluster(here, source="this test")), law_profile, tmp_path)
    python = tool(tmp_path, "python", f'XDG_CACHE_HOME={cache} exec {interpreter(tmp_path)} "$@"')
    program = start(
        "launch", "--ssh", "--python", python, "--code", code,
        "--env", "GLOO_SOCKET_IFNAME=lo", "--restarts", "2", "--",
        "train", plan_path, "--steps", "1000000", "--out", out, "--listen", "127.0.0.1:0", "--lost-after", "2 s",
        "--checkpoint-every", "5",
    )  # fmt: skip
    program.wait_to_hear("step 1/")
    until((out / "checkpoint" / "latest").exists)
    before = workers(cache)
    assert before.keys() == {"s0r0", "s1r0"}
    program.process.send_signal(signal.SIGSTOP)
    psutil.wait_procs(list(before.values()), PATIENCE_S)
    assert workers(cache) == {}
    program.process.send_signal(signal.SIGCONT)
    program.wait_to_hear("Training goes on after")
    assert re.search(r"all go back to the checkpoint after \d+ steps", "".join(program.said))
    program.process.send_signal(signal.SIGINT)
    program.end()
    assert workers(cache) == {}


def test_workers_run_where_ssh_leads_and_all_is_taken_down(start, plan_path, tmp_path, plain_processes):
    """One dies, is named with its log and started again, as is one that is cut off; Ctrl-C ends all on all machines.

    The address of the first is translated, as that of a machine in a cloud: none of its interfaces has it.
    """
    cache, out, code = tmp_path / "cache", tmp_path / "run", tmp_path / "code"
    code.mkdir()
    (code / "own.py").write_text("x = 1\n")
    config = ssh_config(tmp_path, {"s0r0": [], "other-name": []})
    python = tool(tmp_path, "python", f'XDG_CACHE_HOME={cache} exec {interpreter(tmp_path)} "$@"')
    program = start(
        "launch", "--ssh", "--option", f"-F {config}", "--python", python, "--code", code,
        "--env", "GLOO_SOCKET_IFNAME=lo", "--restarts", "1", "--",
        "train", plan_path, "--steps", "1000000", "--out", out, "--listen", "127.0.0.1:0",
    )  # fmt: skip
    program.wait_to_hear("step 1/")
    found = workers(cache)
    assert found.keys() == {"s0r0", "s1r0", "s1r1"}
    found["s1r0"].kill()
    program.wait_to_hear(f"Device s1r0: its worker was killed by signal 9; its log: {out}/logs/s1r0.log")
    log = out / "logs" / "s1r0.log"
    until(lambda: log.read_text().count(" spantrain worker --name s1r0 ") == 2)  # started again
    keeper = found["s0r0"].parent()
    assert keeper is not None
    keeper.kill()
    program.wait_to_hear("Device s0r0: its machine ")
    other = out / "logs" / "s0r0.log"
    until(lambda: other.read_text().count(" spantrain worker --name s0r0 ") == 2)  # its machine was reached once more
    until(lambda: "s0r0" in workers(cache))
    program.process.send_signal(signal.SIGINT)
    code_of_end, said = program.end()
    assert code_of_end == 130, said
    assert str(out / "logs" / "s1r0.log") in said
    assert {path.name for path in (out / "logs").iterdir()} == {"s0r0.log", "s1r0.log", "s1r1.log"}
    assert " spantrain worker --name s0r0 " in (out / "logs" / "s0r0.log").read_text()
    assert re.search(r"go on with: spantrain launch --ssh .* -- train --resume", said)
    assert workers(cache) == {}
    nothing_is_left(program)
    psutil.wait_procs(list(found.values()), PATIENCE_S)
