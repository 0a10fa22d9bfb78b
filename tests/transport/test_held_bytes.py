"""What waits on behalf of a peer is bounded by what it really costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.patience import PATIENCE_S


@pytest.fixture(scope="module")
def costs():
    words = [sys.executable, str(Path(__file__).with_name("held_bytes.py"))]
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_message_that_waits_costs_no_more_than_it_is_charged(costs):
    for name, (real_bytes, charge_bytes) in costs["messages"].items():
        assert real_bytes <= charge_bytes, f"{name}: {real_bytes:.0f} bytes, charged {charge_bytes:.0f}"


def test_layers_that_are_opened_before_they_are_expected_take_little(costs):
    assert 16384 * costs["parameter"] < 12 * 2**20, "of all early layers of a peer, together"
