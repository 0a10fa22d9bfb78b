"""Facts of machines become a cluster that reads back as it was written."""

from dataclasses import replace

import pytest

from spantrain.app.machines.describe import ClusterDraft, described_cluster, guessed_kind, own_kind
from spantrain.app.reporter import SilentReporter
from spantrain.config.cluster_file import PRESET_NAMES, load_preset, parse_cluster
from spantrain.config.cluster_text import cluster_text
from spantrain.config.kinds import kind_named
from spantrain.reach.pairs import PairReport
from testing.machines import GIB, gpu, machine


def way(round_trip_s, rate, address="10.9.9.9"):
    return PairReport(address=address, round_trip_s=round_trip_s, up_bytes_per_s=rate, down_bytes_per_s=rate / 2)


def read_back(cluster, notes=()):
    assert parse_cluster(cluster_text(cluster, notes=notes), source="written") == cluster
    return cluster


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset_is_written_and_read_back(name):
    read_back(load_preset(name), notes=["a: note", "two\nlines"])


def test_gpus_with_their_kinds_memory_and_numbers():
    found = [machine("lab", gpu("NVIDIA GeForce RTX 4090"), gpu("Tesla T4", memory_gib=15.5)), machine("cpu-box")]
    outcome = described_cluster(found, name="c", measure=False, reporter=SilentReporter())
    cluster = read_back(outcome.cluster, outcome.notes)
    assert any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in note for note in outcome.notes)
    assert [(one.name, one.kind, one.backend, one.memory_bytes / GIB) for one in cluster.devices] == [
        ("lab-gpu0", "rtx-4090", "cuda:0", 24),
        ("lab-gpu1", "t4", "cuda:1", 15.5),
        ("cpu-box", "cpu", "cpu", 20.5),
    ]
    assert [site.hosts for site in cluster.sites] == [("lab", "cpu-box")]
    assert cluster.host_by_name["lab"].address == "lab"


def test_a_gpu_that_nothing_of_ours_can_use_leaves_the_processor_and_is_told():
    outcome = described_cluster(
        [machine("mac", gpu("Voodoo 3", vendor="3dfx"))], name="c", measure=False, reporter=SilentReporter()
    )
    assert [one.backend for one in outcome.cluster.devices] == ["cpu"]
    assert "Voodoo 3 cannot be used yet" in outcome.notes[0]


def test_a_gpu_of_intel_is_used_and_it_is_told_that_none_has_confirmed_it():
    found = [machine("arc", gpu("Intel(R) Arc(TM) A770 Graphics", vendor="intel"))]
    outcome = described_cluster(found, name="c", measure=False, reporter=SilentReporter())
    assert [(one.kind, one.backend) for one in read_back(outcome.cluster).devices] == [("arc-a770", "xpu:0")]
    assert outcome.notes[0].startswith("arc: no GPU has confirmed backend xpu")


def test_a_kind_that_is_not_known_gets_figures_of_its_own():
    odd = gpu("NVIDIA GeForce RTX 4090 Laptop GPU", memory_gib=16.0, power_w=150.0)
    guessed = described_cluster([machine("lap", odd)], name="c", measure=False, reporter=SilentReporter()).cluster
    (kind,) = read_back(guessed).kinds
    assert (kind.name, kind.power_w, kind.memory_bytes) == ("geforce-rtx-4090-laptop-gpu", 150, 16 * GIB)
    assert kind.source == "a guess, since nothing was measured; spantrain profile measures"
    measured = own_kind(odd, fp16=61.23456e12, fp32=20e12, memory_rate=5e11, source="measured")
    draft = ClusterDraft(machines=[machine("lap", odd)], measured_kinds={odd.name: measured})
    assert read_back(draft.cluster("c")).kinds[0].peak_fp16_flop_per_s == 61.2e12
    assert guessed_kind(replace(odd, power_w=None), why="x").power_w > 0


def test_round_trips_make_sites_and_rates_make_links():
    found = [machine("a"), machine("b"), machine("far", address="192.168.7.2/24")]
    closed = PairReport(errors={"10.0.0.1": "no answer"})
    ways = {
        ("a", "b"): way(0.0004, 1.25e8), ("b", "a"): way(0.0004, 1.25e8),
        ("a", "far"): way(0.03, 12_345_678.0, "192.168.7.2"), ("far", "a"): closed,
        ("b", "far"): way(0.0301, 9e6, "192.168.7.2"), ("far", "b"): closed,
    }  # fmt: skip
    draft = ClusterDraft(machines=found, ways=ways)
    cluster = read_back(draft.cluster("c"))
    assert [(site.name, site.hosts) for site in cluster.sites] == [("site-1", ("a", "b")), ("far", ("far",))]
    assert cluster.sites[0].latency_s == 0.0002
    there, back = cluster.links
    assert (there.source, there.target, there.latency_s) == ("site-1", "far", 0.015)
    assert there.bandwidth_bytes_per_s == pytest.approx(12.3e6)
    assert back.bandwidth_bytes_per_s == pytest.approx(6.17e6)
    assert cluster.host_by_name["far"].address == "192.168.7.2"
    assert draft.notes == []


def test_what_was_said_of_sites_holds_and_what_was_not_measured_is_told():
    found = [
        machine("a", site="lab"), machine("b"), machine("c", address="10.0.0.3/24"), machine("d", address="10.5.0.4/24")
    ]  # fmt: skip
    outcome = described_cluster(found, name="x", measure=False, reporter=SilentReporter())
    cluster = read_back(outcome.cluster, outcome.notes)
    assert {site.name: site.hosts for site in cluster.sites} == {"lab": ("a",), "site-1": ("b", "c"), "d": ("d",)}
    assert "nothing was measured" in outcome.notes[0]
    assert any("lab -> d: its rate is assumed" in note for note in outcome.notes)


def test_places_without_any_way_between_them_are_told():
    closed = PairReport(errors={"10.0.0.1": "no answer"})
    draft = ClusterDraft(machines=[machine("a"), machine("b")], ways={("a", "b"): closed, ("b", "a"): closed})
    read_back(draft.cluster("c"))
    assert draft.notes[0] == "link a -> b: its rate is assumed: no way was found; see spantrain doctor"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("NVIDIA RTX A6000", "rtx-a6000"), ("RTX A6000", "rtx-a6000"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"), ("NVIDIA GeForce RTX 4080", "rtx-4080"), ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA A100 80GB PCIe", "a100-80gb"), ("Tesla V100-SXM2-16GB", "v100"),
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", "mi250"), ("AMD Instinct MI300X OAM", "mi300x"),
        ("Intel(R) Arc(TM) A770 Graphics", "arc-a770"), ("Apple M1", "m1"), ("Apple M4 Max", "m4-max"),
        ("NVIDIA Jetson Nano Developer Kit", "jetson-nano"), ("NVIDIA Jetson Orin Nano Developer Kit", "orin-nano"),
        ("NVIDIA Jetson AGX Orin Developer Kit", "agx-orin"), ("NVIDIA Jetson AGX Thor Developer Kit", "agx-thor"),
        ("NVIDIA GeForce RTX 4080 SUPER", None), ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Quadro RTX 8000", "rtx-8000"), ("NVIDIA TITAN RTX", "titan-rtx"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"), ("NVIDIA A10G", None),
        ("AMD Instinct MI250X / MI250", None), ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None), ("", None), ("cpu", None),
    ],
)  # fmt: skip
def test_names_of_gpus_find_their_kind_and_no_other(name, kind):
    assert kind_named(name) == kind
