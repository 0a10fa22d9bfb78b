"""A program that prints what its machine is, as one JSON object; `machines.run_python` sends it, `facts` reads it.

It runs by any Python from 3.6 on, with the standard library alone, where nothing of SpanTrain is installed: types stand
in quotes, and what newer versions have is not used. What cannot be found out is left out or null, never an error.
Arguments: `--deep` loads torch and times encryption, too (seconds); further words are paths whose digests are wanted.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from importlib.util import find_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ASK_S = 20
MOST_FILES = 20000
EDGE_BYTES = 2**20
CURVE_S = 0.3
SLOWED = {0x8: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""Of NVML's clock event reasons those that no user has asked for; idle and power caps are not among them."""
PCI_NAMES = {
    "0x1002:0x740c": "AMD Instinct MI250",
    "0x1002:0x740f": "AMD Instinct MI210",
    "0x1002:0x74a1": "AMD Instinct MI300X",
    "0x8086:0x56a0": "Intel Arc A770",
    "0x8086:0x56a1": "Intel Arc A750",
    "0x8086:0xe20b": "Intel Arc B580",
}
VENDORS = {"0x1002": "amd", "0x8086": "intel", "0x10de": "nvidia"}


def read(path: str) -> str:
    """Return a small file's text, or nothing."""
    try:
        with open(path, "rb") as stream:
            return stream.read(2**16).decode("utf-8", "replace").strip("\0 \n")
    except OSError:
        return ""


def answer(*words: str) -> str:
    """Return what a command prints, or nothing."""
    try:
        said = subprocess.check_output(words, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=ASK_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said[: 2**18].decode("utf-8", "replace")


def number(text: str, unit: float = 1) -> "float | None":
    """Return a number of units, or null: tools write N/A, [Not Supported] and the like."""
    try:
        return float(text) * unit
    except ValueError:
        return None


def nvidia() -> "list[dict[str, Any]]":
    """Return NVIDIA's GPUs, by nvidia-smi, else by the driver's files."""

    def ask(fields: str) -> "list[list[str]]":
        said = answer("nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits")
        rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
        return [row for row in rows if len(row) == fields.count(",") + 1]

    found = {}  # type: dict[str, dict[str, Any]]
    rows = ask("index,name,memory.total,memory.free,driver_version,power.limit")
    for index, name, total, free, driver, power in rows:
        found[index] = {
            "name": name,
            "vendor": "nvidia",
            "memory_bytes": number(total, 2**20),
            "free_bytes": number(free, 2**20),
            "driver": driver,
            "power_w": number(power),
            "slowed": [],
        }
    for field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active") if found else ():
        rows = ask("index," + field)
        for index, mask in rows:
            if index in found and re.match("0x[0-9a-fA-F]+$", mask):
                found[index]["slowed"] = [text for bit, text in SLOWED.items() if int(mask, 16) & bit]
        if rows:
            break
    if found:
        return list(found.values())
    module = re.search(r"Kernel Module(?: for \w+)?\s+([\d.]+)", read("/proc/driver/nvidia/version"))
    folder = "/proc/driver/nvidia/gpus"
    models = [read(os.path.join(folder, bus, "information")) for bus in sorted(listed(folder))]
    matches = [re.search(r"Model:\s+(.+)", model) for model in models]
    version = module.group(1) if module else None
    return [{"name": one.group(1), "vendor": "nvidia", "driver": version} for one in matches if one]


def listed(folder: str) -> "list[str]":
    """Return the names in a folder, none if it is none."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def amd() -> "list[dict[str, Any]]":
    """Return AMD's GPUs, by rocm-smi, whose words changed their case over the years."""
    said = answer("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json")
    try:
        cards = json.loads(said[said.find("{") :])
    except ValueError:
        return []
    if not isinstance(cards, dict):
        return []
    cards = {name: {str(key).lower(): str(card[key]) for key in card} for name, card in cards.items()}
    driver = cards.get("system", {}).get("driver version")
    found = []
    for name in sorted((name for name in cards if re.match(r"card\d+$", name)), key=lambda name: int(name[4:])):
        card = cards[name]
        total, used = (number(card.get(f"vram total {word}memory (b)", "")) for word in ("", "used "))
        series = next((card[key] for key in ("card series", "device name", "card model") if key in card), "AMD GPU")
        bracketed = re.search(r"\[(.+)\]", series)
        free = total - used if total is not None and used is not None else None
        entry = {"name": bracketed.group(1) if bracketed else series, "vendor": "amd", "driver": driver}
        found.append(dict(entry, memory_bytes=total, free_bytes=free))
    return found


def by_bus(vendor: str) -> "list[dict[str, Any]]":
    """Return the GPUs of a vendor that have their own memory, by sysfs, for machines without the vendor's tools."""
    found = []
    for card in sorted(name for name in listed("/sys/class/drm") if re.match(r"card\d+$", name)):
        folder = f"/sys/class/drm/{card}/device/"
        code, total = read(folder + "vendor"), number(read(folder + "mem_info_vram_total"))
        name = read(folder + "product_name") or PCI_NAMES.get(code + ":" + read(folder + "device"), "")
        if VENDORS.get(code) == vendor and name:
            used = number(read(folder + "mem_info_vram_used"))
            free = total - used if total is not None and used is not None else None
            found.append({"name": name, "vendor": vendor, "memory_bytes": total, "free_bytes": free})
    return found


def accelerators(memory: "dict[str, Any]") -> "list[dict[str, Any]]":
    """Return all accelerators; those of a Jetson and of Apple share the machine's memory."""
    model = read("/proc/device-tree/model")
    if "Jetson" in model or "Orin" in model or "Thor" in model or model == "quill":
        release = re.search(r"R(\d+).*REVISION: ([\d.]+)", read("/etc/nv_tegra_release"))
        driver = "L4T " + ".".join(release.groups()) if release else None
        return [dict(memory, name="Jetson TX2" if model == "quill" else model, vendor="jetson", driver=driver)]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        chip = answer("sysctl", "-n", "machdep.cpu.brand_string").strip()
        return [dict(memory, name=chip, vendor="apple", driver=platform.mac_ver()[0])]
    return nvidia() + (amd() or by_bus("amd")) + by_bus("intel")


def memory() -> "dict[str, Any]":
    """Return the memory that this process may have, all of it and what is free: of the machine, or of its container."""
    lines = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    total, free = number(lines.get("MemTotal", ""), 1024), number(lines.get("MemAvailable", ""), 1024)
    if total is None:
        total = free = number(answer("sysctl", "-n", "hw.memsize").strip())
    limit = number(read("/sys/fs/cgroup/memory.max")) or number(read("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    used = number(read("/sys/fs/cgroup/memory.current")) or 0
    if limit is not None and total is not None and limit < total:
        total, free = limit, min(free or limit, limit - used)
    return {"memory_bytes": total, "free_bytes": free}


def interfaces() -> "list[dict[str, Any]]":
    """Return the network interfaces with addresses for others: not loopback, nor the bridges of containers."""
    if sys.platform == "darwin":
        return list(of_ifconfig(answer("ifconfig")))
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            if re.match("(docker|br-|virbr|veth|cni|podman)", name):
                continue
            addresses = []
            request = struct.pack("256s", name.encode()[:15])
            try:
                address = socket.inet_ntoa(fcntl.ioctl(asked, 0x8915, request)[20:24])  # SIOCGIFADDR
                mask = fcntl.ioctl(asked, 0x891B, request)[20:24]  # SIOCGIFNETMASK
                addresses.append(f"{address}/{bin(int.from_bytes(mask, 'big')).count('1')}")
            except OSError:
                pass  # it has no IPv4 address
            for line in read("/proc/net/if_inet6").splitlines():
                digits, _, prefix, scope, _, owner = line.split()
                if owner == name and scope == "00":
                    address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
                    addresses.append(f"{address}/{int(prefix, 16)}")
            if addresses and not addresses[0].startswith("127."):
                found.append({"name": name, "addresses": addresses})
    return found


def of_ifconfig(text: str) -> "Iterator[dict[str, Any]]":
    """Yield what macOS's ifconfig tells."""
    for name, lines in re.findall(r"^(\w+): flags=\S+ mtu \d+\n((?:\t.*\n)*)", text, re.MULTILINE):
        pairs = re.findall(r"inet (\S+) netmask 0x(\w+)", lines)
        addresses = [f"{address}/{bin(int(mask, 16)).count('1')}" for address, mask in pairs]
        if addresses and not addresses[0].startswith("127."):
            yield {"name": name, "addresses": addresses}


def packages() -> "dict[str, str]":
    """Return the versions of what SpanTrain needs, as far as this interpreter has them; none is loaded."""
    try:
        from importlib.metadata import PackageNotFoundError, version
    except ImportError:
        return {}
    found = {}
    for name in ("spantrain", "torch", "pyzmq", "grpcio", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def digest(path: str) -> str:
    """Return a digest of a file or folder: names, sizes, and of each file the first and the last MiB."""
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        return "missing"
    files = [path]
    if os.path.isdir(path):
        found = ((folder, name) for folder, _, names in os.walk(path) for name in names if name[-4:] != ".pyc")
        files = sorted(os.path.join(folder, name) for folder, name in found)[:MOST_FILES]
    whole = hashlib.sha256()
    for file in files:
        try:
            with open(file, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                whole.update(f"{os.path.relpath(file, path)} {size}\n".encode())
                whole.update(stream.read(EDGE_BYTES))
                stream.seek(max(EDGE_BYTES, size - EDGE_BYTES))
                whole.update(stream.read(EDGE_BYTES))
        except OSError as error:
            return f"unreadable: {file}: {error.strerror}"
    return whole.hexdigest()[:16]


def code_digest() -> "str | None":
    """Return the digest of the package that this interpreter would import."""
    found = find_spec("spantrain")
    folders = list(found.submodule_search_locations or ()) if found else []
    return digest(folders[0]) if folders else None


def testbed() -> "dict[str, str]":
    """Say what an emulated network lacks here: an empty text is nothing."""
    lacks = {"tun": "", "namespaces": ""}
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        lacks["tun"] = f"/dev/net/tun: {error.strerror}"
    if os.geteuid() != 0 and not answer("unshare", "--user", "--net", "echo", "yes"):
        lacks["namespaces"] = "user namespaces are not allowed"
    return lacks


def torch_sees() -> "dict[str, Any] | None":
    """Load torch and say which GPUs it can use, and why not."""
    if find_spec("torch") is None:
        return None
    try:
        import torch

        usable = torch.cuda.is_available()
        if usable:
            torch.zeros(1, device="cuda").item()
        made_for = torch.version.cuda or getattr(torch.version, "hip", None)
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count() if usable else 0)]
        return {"gpus": names, "made_for": made_for, "error": ""}
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the answer
        return {"gpus": [], "made_for": None, "error": " ".join(str(error).split())[:300] or type(error).__name__}


def curve_rate() -> "float | None":
    """Return bytes per second through CURVE on loopback, both ends on this machine; null without pyzmq or CURVE."""
    try:
        import zmq
    except ImportError:
        return None
    if not zmq.has("curve"):
        return 0.0
    context = zmq.Context()
    try:
        server, client = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        public, server.curve_secretkey = zmq.curve_keypair()
        server.curve_server = True
        client.curve_serverkey = public
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        for end in (server, client):
            end.linger, end.rcvtimeo, end.sndtimeo = 0, 5000, 5000
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        piece, sent = bytes(2**18), 0
        client.send(piece)
        server.recv()
        begin = time.monotonic()
        while time.monotonic() < begin + CURVE_S:
            client.send(piece)
            sent += len(server.recv())
        return sent / (time.monotonic() - begin)
    except zmq.ZMQError:
        return None
    finally:
        context.destroy(linger=0)


def main(words: "list[str]") -> None:
    """Print all of it."""
    deep, paths = "--deep" in words, [word for word in words if word != "--deep"]
    has = memory()
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    code = code_digest()
    home = os.path.expanduser("~")
    found = dict(
        has,
        hostname=socket.gethostname(),
        system=platform.system() + " " + platform.release(),
        python=platform.python_version(),
        executable=sys.executable,
        processors=count,
        disk_free_bytes=shutil.disk_usage(home if os.path.isdir(home) else "/").free,
        home_problem="" if os.access(home, os.W_OK) else f"{home} cannot be written to, or is not there",
        interfaces=interfaces(),
        accelerators=accelerators(has),
        packages=packages(),
        digests=dict({path: digest(path) for path in paths}, **({"spantrain": code} if code else {})),
        testbed=testbed(),
        torch=torch_sees() if deep else None,
        curve_bytes_per_s=curve_rate() if deep else None,
    )
    print(json.dumps(found))  # noqa: T201 - to whoever sent it


if __name__ == "__main__":
    main(sys.argv[1:])
