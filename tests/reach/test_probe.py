"""What a probe finds by tools that print what real ones have printed, and what is refused of its answers."""

import ast
import json
from pathlib import Path

import pytest

import spantrain.reach.programs
from spantrain.errors import ProtocolError
from spantrain.reach.facts import MachineFacts, probe, program, read_facts
from spantrain.reach.machines import run_python, this_machine
from testing.machines import tool
from testing.patience import PATIENCE_S

HERE = this_machine("here")
NVIDIA = """case "$*" in
*memory.total*) echo "0, NVIDIA GeForce RTX 4090, 24564, 24083, 550.54.15, 450.00"
                echo "1, NVIDIA L4, 23034, 12000, 550.54.15, [N/A]";;
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
*clocks_throttle_reasons*) echo "0, 0x0000000000000001"; echo "1, 0x0000000000000068";;
esac"""
"""Of a driver from before the reasons were renamed."""
ROCM = {
    "card1": {"Card series": "AMD INSTINCT MI250 (MCM) OAM AC MBA", "Card model": "0x0b0c",
              "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "10960896"},
    "card0": {"Card Series": "Radeon RX 7900 XT", "Card Model": "0x744c", "GFX Version": "gfx1100",
              "VRAM Total Memory (B)": "21458059264", "VRAM Total Used Memory (B)": "27856896"},
    "card2": {"Card series": "Arcturus GL-XL [AMD Instinct MI100]", "Card model": "0x0c34"},
    "system": {"Driver version": "6.3.6"},
}  # fmt: skip


@pytest.fixture
def tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return lambda name, script: tool(tmp_path, name, script)


def test_programs_are_such_as_old_pythons_read():
    for path in Path(spantrain.reach.programs.__path__[0]).glob("*.py"):
        ast.parse(path.read_text("utf-8"), feature_version=(3, 6))


def test_this_machine_tells_what_it_is(tools, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("abc")
    facts = probe(HERE, paths=(str(tmp_path / "data"), "/nowhere"))
    assert facts.processors >= 1
    assert facts.free_bytes
    assert facts.free_bytes <= facts.memory_bytes
    assert facts.packages["torch"]
    assert facts.digests["/nowhere"] == "missing"
    before = facts.digests[str(tmp_path / "data")]
    (tmp_path / "data" / "a.txt").write_text("abd")
    assert probe(HERE, paths=(str(tmp_path / "data"),)).digests[str(tmp_path / "data")] != before


def test_nvidia_smi(tools):
    tools("nvidia-smi", NVIDIA)
    first, second = probe(HERE).accelerators
    assert (first.name, first.vendor, first.driver, first.power_w) == (
        "NVIDIA GeForce RTX 4090", "nvidia", "550.54.15", 450
    )  # fmt: skip
    assert (first.memory_bytes, first.free_bytes) == (24564 * 2**20, 24083 * 2**20)
    assert first.slowed == ()
    assert second.power_w is None
    assert second.slowed == ("hardware slowdown", "too hot (software)", "too hot (hardware)")


def test_a_broken_nvidia_smi_is_no_gpu(tools):
    tools("nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9")
    assert probe(HERE).accelerators == ()


def test_rocm_smi_of_all_years(tools):
    tools(
        "rocm-smi", f"echo 'WARNING: AMD GPU device(s) is/are in a low-power state.'\ncat <<'E'\n{json.dumps(ROCM)}\nE"
    )
    found = probe(HERE).accelerators
    assert [one.name for one in found] == [
        "Radeon RX 7900 XT", "AMD INSTINCT MI250 (MCM) OAM AC MBA", "AMD Instinct MI100"
    ]  # fmt: skip
    assert {one.vendor for one in found} == {"amd"}
    assert {one.driver for one in found} == {"6.3.6"}
    assert found[1].memory_bytes == 68702699520
    assert found[2].memory_bytes is None


def on_files(root, files):
    """What the probe finds on a machine that has these files of the kernel's, and no tools."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    source = program("probe").replace('"/proc/', f'"{root}/proc/').replace('"/sys/', f'"{root}/sys/')
    return read_facts(run_python(HERE, source, timeout_s=PATIENCE_S), "here")


def test_a_jetson_by_its_model_file_shares_the_machines_memory(tools, tmp_path):
    model = "NVIDIA Jetson AGX Orin Developer Kit\0"
    memory = "MemTotal:       32161000 kB\nMemFree: 1 kB\nMemAvailable:   29000000 kB\n"
    tools("nvidia-smi", 'case "$*" in *memory.total*) echo "0, Orin (nvgpu), [N/A], [N/A], N/A, [N/A]";; esac')
    facts = on_files(tmp_path, {"proc/device-tree/model": model, "proc/meminfo": memory})
    (one,) = facts.accelerators
    assert (one.name, one.vendor) == ("NVIDIA Jetson AGX Orin Developer Kit", "jetson")
    assert one.memory_bytes == facts.memory_bytes == 32161000 * 1024
    assert one.free_bytes == 29000000 * 1024


def test_gpus_without_their_tools_are_found_by_the_kernels_files(tools, tmp_path):
    folder = "proc/driver/nvidia"
    information = "Model: \t\t NVIDIA GeForce RTX 3090\nIRQ:   \t\t 66\n"
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\nGCC version: 12\n"
    amd, arc = "sys/class/drm/card1/device", "sys/class/drm/card0/device"
    files = {
        f"{folder}/version": version, f"{folder}/gpus/0000:01:00.0/information": information,
        f"{amd}/vendor": "0x1002\n", f"{amd}/device": "0x74a1\n", f"{amd}/mem_info_vram_total": "206141652992\n",
        f"{amd}/mem_info_vram_used": "1000\n", f"{arc}/vendor": "0x8086\n", f"{arc}/device": "0x56a0\n",
        "sys/class/drm/card2/device/vendor": "0x1a03\n", "sys/class/drm/card0-DP-1/status": "connected\n",
    }  # fmt: skip
    found = on_files(tmp_path, files).accelerators
    assert [(one.name, one.vendor) for one in found] == [
        ("NVIDIA GeForce RTX 3090", "nvidia"), ("AMD Instinct MI300X", "amd"), ("Intel Arc A770", "intel")
    ]  # fmt: skip
    assert found[0].driver == "535.183.01"
    assert found[1].free_bytes == 206141652992 - 1000


def test_a_container_has_the_memory_that_it_may_have(tools, tmp_path):
    memory = "MemTotal:       32161000 kB\nMemAvailable:   29000000 kB\n"
    limits = {"sys/fs/cgroup/memory.max": "4294967296\n", "sys/fs/cgroup/memory.current": "1073741824\n"}
    facts = on_files(tmp_path, {"proc/meminfo": memory, **limits})
    assert (facts.memory_bytes, facts.free_bytes) == (4 * 2**30, 3 * 2**30)


def test_a_user_without_a_home_folder_is_told(tools, tmp_path, monkeypatch):
    """As on many a node, and in pods that run as some number."""
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    facts = probe(HERE)
    assert facts.home_problem == f"{tmp_path}/gone cannot be written to, or is not there"
    assert facts.disk_free_bytes > 0


GOOD = {
    "hostname": "lab1", "system": "Linux", "python": "3.11.2", "executable": "/usr/bin/python3",
    "processors": 8, "memory_bytes": 1e9, "free_bytes": None, "disk_free_bytes": 1e9,
    "interfaces": [{"name": "eth0", "addresses": ["10.0.0.5/24", "fd00::5/64"]}], "accelerators": [],
    "packages": {}, "digests": {},
}  # fmt: skip


def test_greetings_before_an_answer_are_passed_over():
    facts = read_facts(f"Welcome to lab1!\n\n{json.dumps(GOOD)}\n", "lab1")
    assert isinstance(facts, MachineFacts)
    assert facts.addresses == ("10.0.0.5", "fd00::5")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hostname": "a\x1b[2J"}, "printable"),
        ({"hostname": "a" * 1000}, "printable"),
        ({"processors": "8"}, "processors"),
        ({"memory_bytes": -1.0}, "memory_bytes"),
        ({"memory_bytes": 1e300}, "memory_bytes"),
        ({"accelerators": [{"name": "x", "vendor": "y"}] * 65}, "65 entries"),
        ({"packages": {str(n): "1" for n in range(65)}}, "65 entries"),
        ({"interfaces": [{"name": "e", "addresses": ["10.0.0.5; rm"]}]}, "does not appear to be"),
        ({"sudo": "yes"}, "unknown key"),
    ],
)
def test_what_no_machine_is_is_refused(change, said):
    with pytest.raises(ProtocolError, match=said):
        read_facts(json.dumps(GOOD | change), "lab1")


@pytest.mark.parametrize("text", ["", "command not found", "[" * 100_000, "{}", '{"a": 1, "a": 2}', "null"])
def test_what_is_no_answer_is_refused(text):
    with pytest.raises(ProtocolError, match="lab1"):
        read_facts(text, "lab1")
