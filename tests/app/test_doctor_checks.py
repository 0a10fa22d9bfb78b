"""What the doctor says of machines by themselves, and of what should be alike: a verdict, and what to do."""

import pytest

from spantrain.app.machines.checks import common_lines, machine_lines, way_lines
from spantrain.config.cluster_file import parse_cluster
from spantrain.reach.facts import TorchView
from spantrain.reach.pairs import PairReport
from spantrain.version import VERSION
from testing.machines import GIB, gpu, machine

GOOD = {"packages": {"spantrain": VERSION, "torch": "2.8.0+cu126"}, "digests": {"spantrain": "aa"}}


def lines(one, **asked):
    return list(machine_lines(one, **{"cluster": None, "deep": False, "testbed": False, **asked}))


def verdicts(found):
    return {(line.check, line.verdict) for line in found}


def line_of(found, check):
    return next(line for line in found if line.check == check and line.verdict != "ok")


def test_a_good_machine_is_good():
    seen = TorchView(gpus=("NVIDIA L4",), made_for="12.6", error="")
    one = machine("a", gpu("NVIDIA L4", free_bytes=23.0 * GIB), torch=seen, curve_bytes_per_s=4e8, **GOOD)
    found = lines(one, deep=True, testbed=True)
    assert {line.verdict for line in found} == {"ok"}
    assert not any(line.remedy for line in found)


@pytest.mark.parametrize(
    ("more", "check", "verdict", "text"),
    [
        ({"python": "3.8.10"}, "python", "fail", "Python 3.8.10"),
        ({"packages": {}, "digests": {}}, "spantrain", "fail", "is not installed"),
        ({"packages": {"spantrain": "0.0.1"}}, "spantrain", "fail", "version 0.0.1"),
        ({"packages": {"spantrain": VERSION}}, "torch", "fail", "is not installed"),
        (
            {"torch": TorchView(gpus=(), made_for=None, error="libcudart.so.12: cannot open")},
            "torch",
            "fail",
            "libcudart",
        ),
        ({"free_bytes": 1.0 * GIB}, "memory", "warn", "1 GiB of 32 GiB free"),
        ({"disk_free_bytes": 5.0 * GIB}, "disk", "warn", "5 GiB free"),
        ({"disk_free_bytes": 1e6}, "disk", "fail", "977 KiB free"),
        ({"home_problem": "/home/me is not there"}, "disk", "fail", "home folder /home/me is not there"),
        ({"curve_bytes_per_s": 3e7}, "encryption", "warn", "240 Mbit/s on one core, as libzmq does without libsodium"),
        ({"curve_bytes_per_s": 0.0}, "encryption", "fail", "no CURVE"),
        ({"testbed": {"tun": "/dev/net/tun: No such file"}}, "testbed", "warn", "No such file"),
    ],
)
def test_what_would_stop_a_run_is_told_with_a_remedy(more, check, verdict, text):
    found = lines(machine("a", **{**GOOD, **more}), deep=True, testbed=True)
    line = line_of(found, check)
    assert line.verdict == verdict
    assert text in line.text
    assert line.remedy


def test_gpus_that_are_slowed_or_in_use_or_hidden_from_torch():
    hot = gpu("NVIDIA L4", slowed=("too hot (hardware)",), driver="470.1")
    used = gpu("NVIDIA L4", free_bytes=2.0 * GIB)
    seen = TorchView(gpus=(), made_for="12.6", error="")
    found = lines(machine("a", hot, used, torch=seen, **GOOD), deep=True)
    slowed, busy = (line for line in found if line.check == "gpu")
    assert (slowed.where, slowed.verdict, slowed.text) == ("a/0", "warn", "NVIDIA L4 is slowed: too hot (hardware)")
    assert (busy.verdict, busy.text) == ("warn", "NVIDIA L4, driver not known, 2 GiB of 24 GiB free")
    assert line_of(found, "driver").text == "torch can use 0 of 2 GPUs; it is made for 12.6, the driver is 470.1"


def test_gpus_that_torch_numbers_otherwise():
    seen = TorchView(gpus=("NVIDIA L4", "Tesla T4"), made_for="12.6", error="")
    found = lines(machine("a", gpu("Tesla T4"), gpu("NVIDIA L4"), torch=seen, **GOOD), deep=True)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in line_of(found, "driver").remedy


def test_a_cluster_file_that_says_more_than_is_there():
    text = """name: c
sites:
  - name: s
    network: {bandwidth: 1 Gbit/s, latency: 1 ms}
    hosts: [{name: a, backend: cuda, devices: {l4: 1, t4: 1}}]
"""
    cluster = parse_cluster(text, source="c")
    found = lines(machine("a", gpu("NVIDIA L40S"), **GOOD), cluster=cluster)
    kind, missing = (line for line in found if line.check == "cluster")
    assert (kind.verdict, kind.text) == ("warn", "a-gpu0 is said to be a l4, and cuda:0 is a l40s")
    assert (missing.verdict, missing.text) == ("fail", "a-gpu1 is cuda:1, and 1 are there")


def test_code_data_and_versions_must_be_alike():
    one = machine("a", packages={"torch": "2.8.0+cu126"}, digests={"spantrain": "aa", "/data": "11", "/x": "missing"})
    other = machine("b", packages={"torch": "2.7.0"}, digests={"spantrain": "bb", "/data": "11", "/x": "22"})
    found = list(common_lines([one, other], ["/data", "/x"]))
    assert verdicts(found) == {("code", "fail"), ("data", "ok"), ("data", "fail"), ("versions", "warn")}
    assert line_of(found, "code").text == "spantrain differs: aa on a; bb on b"
    assert (line_of(found, "data").where, line_of(found, "data").text) == ("a", "/x: missing")
    assert line_of(found, "versions").text == "torch: 2.8.0 on a; 2.7.0 on b"


def open_way(**more):
    usual = {"address": "10.0.0.2", "local_address": "10.0.0.1", "seen_address": "10.0.0.1", "round_trip_s": 0.02}
    return PairReport(**{**usual, "interface_mtu": 1500, "path_mtu": 1500, **more})


CLOSED = PairReport(errors={"10.0.0.1": "no answer"})


@pytest.mark.parametrize(
    ("there", "back", "check", "verdict", "text"),
    [
        (open_way(), CLOSED, "ports", "fail", "b cannot connect to a (10.0.0.1: no answer); the other way it can"),
        (open_way(seen_address="1.2.3.4"), open_way(), "nat", "warn", "b sees a as 1.2.3.4, which is 10.0.0.1 at home"),
        (open_way(path_mtu=1280), open_way(), "mtu", "fail", "packets of 1280 bytes pass, and the interface"),
        (open_way(interface_mtu=1280, path_mtu=1280), open_way(), "mtu", "warn", "1280 bytes at most, as tunnels"),
        (open_way(clock_offset_s=-90.0), open_way(), "clock", "warn", "a's clock is 90 s ahead of b's"),
        (CLOSED, open_way(clock_offset_s=-90.0), "clock", "warn", "b's clock is 90 s ahead of a's"),
        (open_way(up_bytes_per_s=1e6, down_bytes_per_s=2e6), open_way(), "rate", "warn",
         "20 ms there and back, 8 Mbit/s there, 16 Mbit/s back"),
    ],
)  # fmt: skip
def test_what_is_wrong_between_two_is_told_with_a_remedy(there, back, check, verdict, text):
    line = line_of(list(way_lines(["a", "b"], {("a", "b"): there, ("b", "a"): back})), check)
    assert line.verdict == verdict
    assert text in line.text
    assert line.remedy


def test_a_good_way_is_good():
    way = open_way(up_bytes_per_s=1e8, down_bytes_per_s=1e8)
    found = list(way_lines(["a", "b"], {("a", "b"): way, ("b", "a"): way}))
    assert {line.verdict for line in found} == {"ok"}
