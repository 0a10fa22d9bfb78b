"""What `spantrain launch --ssh` finds missing on machines, before anything is started."""

import pytest

from spantrain.app.launch.ssh import SshWorkers
from spantrain.app.launch.way import LaunchOptions, LaunchWay, WantedWorkers
from spantrain.app.reporter import SilentReporter
from spantrain.errors import ConfigError, PeerLostError
from testing.launches import on_this_machine, wanted_workers


@pytest.fixture
def wanted(tmp_path) -> WantedWorkers:
    return wanted_workers(tmp_path)


def test_all_that_machines_lack_is_told_at_once(wanted, tmp_path):
    """In the one message, before anything is started."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexec python3 -I -S "$@"\n')
    python.chmod(0o755)
    way = LaunchWay(workers=SshWorkers, options=LaunchOptions(python={"": str(python)}))
    with pytest.raises(ConfigError) as refused:
        way.prepare(on_this_machine(wanted), SilentReporter())
    text = str(refused.value)
    assert f"big: {python} cannot import spantrain and torch; install it there (pip install spantrain)" in text
    assert "data /data/text with space is not on big, small, box; copy it there: code is copied, data are not" in text


def test_a_machine_that_is_not_there_is_named_with_the_remedy(wanted):
    way = LaunchWay(workers=SshWorkers, options=LaunchOptions(words={"": ("-F", "/dev/null")}))
    with pytest.raises(PeerLostError, match=r"box \(by ssh, me@gate\): cannot be reached: .*; make `ssh -F /dev/null"):
        way.prepare(on_this_machine(wanted, but="box"), SilentReporter())
