"""What would stop or slow a run: of single machines, of all together, of what goes between them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from spantrain.app.machines.describe import FoundMachine, usable_backend
from spantrain.config.kinds import kind_named
from spantrain.core.cluster import Cluster
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds
from spantrain.core.records import Record
from spantrain.reach.facts import FoundAccelerator, MachineFacts
from spantrain.reach.pairs import Pair, PairReport, pairs_of
from spantrain.version import VERSION

Verdict = Literal["ok", "warn", "fail"]

OLDEST_PYTHON = (3, 11)
_LEAST_MEMORY_BYTES = 4 * 2**30
_FREE_PART = 0.8
"""Of a GPU's memory; others use it where less is free."""
_LEAST_DISK_BYTES, _NO_DISK_BYTES = 10 * 2**30, 2**30
_SLOW_CURVE_BYTES_PER_S = 80e6
"""libzmq with libsodium encrypts several hundred MB/s on one core, with its own tweetnacl some tens."""
_USUAL_MTU, _LEAST_MTU = 1400, 1280
_CLOCK_S = 1.0
_SLOW_BYTES_PER_S = 10e6 / 8

_FITTING = "install a torch that fits the driver (https://pytorch.org/get-started)"
_INSTALL = "install it there, or name the interpreter of its environment with --python (`python` in an inventory)"


class CheckLine(Record):
    """What one check found."""

    check: str
    where: str
    """A machine, `one->other`, or `all`."""
    verdict: Verdict
    text: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def line_of(check: str, where: str, text: str, remedy: str = "", *, fails: bool = False) -> CheckLine:
    """Return what a check found: a warning if there is something to do, or a failure."""
    verdict: Verdict = "fail" if fails else "warn" if remedy else "ok"
    return CheckLine(check=check, where=where, verdict=verdict, text=text, remedy=remedy)


def machine_lines(one: FoundMachine, *, cluster: Cluster | None, deep: bool, testbed: bool) -> Iterator[CheckLine]:
    """Yield what is found on one machine by itself.

    Args:
        one: the machine.
        cluster: what a cluster file says is there, if one is given.
        deep: whether torch was loaded there.
        testbed: whether emulated networks are asked about.
    """
    facts, where = one.facts, one.machine.name
    yield _python(facts, where)
    yield from _packages(facts, where)
    yield from _gpus(facts, where, deep)
    if cluster is not None:
        yield from _as_described(one, cluster)
    yield from _room(facts, where)
    if deep:
        yield from _curve(facts, where)
    if testbed:
        yield from _testbed(facts, where)


def _python(facts: MachineFacts, where: str) -> CheckLine:
    version = tuple(map(int, re.findall(r"\d+", facts.python)[:2]))
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if version < OLDEST_PYTHON:
        remedy = f"install Python {oldest} or newer there, and name it with --python"
        return line_of("python", where, f"Python {facts.python}", remedy, fails=True)
    return line_of("python", where, f"Python {facts.python}, {facts.system}")


def _packages(facts: MachineFacts, where: str) -> Iterator[CheckLine]:
    missing = f"is not installed for {facts.executable}"
    version = facts.packages.get("spantrain")
    if version is None and "spantrain" not in facts.digests:
        yield line_of("spantrain", where, missing, _INSTALL, fails=True)
    elif version not in (None, VERSION):
        remedy = f"install {VERSION} there, or {version} here: all machines need the same"
        yield line_of("spantrain", where, f"version {version}", remedy, fails=True)
    else:
        yield line_of("spantrain", where, f"version {version}" if version else "a checkout")
    torch = facts.packages.get("torch")
    if torch is None:
        yield line_of("torch", where, missing, _INSTALL, fails=True)
    elif facts.torch is not None and facts.torch.error:
        remedy = f"{_FITTING}, or a newer driver"
        yield line_of("torch", where, f"{torch}: {facts.torch.error}", remedy, fails=True)
    else:
        made_for = facts.torch.made_for if facts.torch else None
        yield line_of("torch", where, f"version {torch}" + (f", made for {made_for}" if made_for else ""))


def _gpus(facts: MachineFacts, where: str, deep: bool) -> Iterator[CheckLine]:
    cuda = [one for one in facts.accelerators if (backend := usable_backend(one)) and backend.torch_type == "cuda"]
    seen = facts.torch.gpus if facts.torch else ()
    if deep and facts.torch is not None and not facts.torch.error and len(seen) < len(cuda):
        driver, made_for = cuda[0].driver or "not known", facts.torch.made_for
        why = f"it is made for {made_for}" if made_for else "it is made for processors alone"
        text = f"torch can use {len(seen)} of {len(cuda)} GPUs; {why}, the driver is {driver}"
        yield line_of("driver", where, text, f"{_FITTING}, and see CUDA_VISIBLE_DEVICES", fails=True)
    elif sorted(seen) == sorted(one.name for one in cuda) and list(seen) != [one.name for one in cuda]:
        text = f"torch numbers the GPUs otherwise than the driver does: {', '.join(seen)}"
        remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID for its workers, or change the numbers in the cluster file"
        yield line_of("driver", where, text, remedy)
    for number, one in enumerate(facts.accelerators):
        yield _gpu(one, f"{where}/{number}")


def _gpu(one: FoundAccelerator, where: str) -> CheckLine:
    memory = f", {format_bytes(one.free_bytes)} of {format_bytes(one.memory_bytes)} free" if (
        one.free_bytes is not None and one.memory_bytes
    ) else ""  # fmt: skip
    text = f"{one.name}, driver {one.driver or 'not known'}{memory}"
    shared, remedy = one.vendor in ("jetson", "apple"), ""
    if one.slowed:
        remedy = "see to its cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
        text = f"{one.name} is slowed: {', '.join(one.slowed)}"
    elif memory and not shared and (one.free_bytes or 0) < _FREE_PART * (one.memory_bytes or 0):
        remedy = (
            "end what else uses it (nvidia-smi, rocm-smi --showpids), or plan with less: `memory` in the cluster file"
        )
    return line_of("gpu", where, text, remedy)


def _as_described(one: FoundMachine, cluster: Cluster) -> Iterator[CheckLine]:
    """Compare with the host of this name: each of its real accelerators must be there."""
    where = one.machine.name
    host = cluster.host_by_name.get(where)
    there = [accelerator for accelerator in one.facts.accelerators if usable_backend(accelerator)]
    for device in [cluster.device_by_name[name] for name in host.devices] if host else []:
        name, colon, number = device.backend.partition(":")
        if not colon:
            continue
        if int(number) >= len(there):
            text = f"{device.name} is {device.backend}, and {len(there)} are there"
            remedy = "see the driver and CUDA_VISIBLE_DEVICES, or correct the cluster file (spantrain init)"
            yield line_of("cluster", where, text, remedy, fails=True)
            continue
        found = kind_named(there[int(number)].name)
        if found is not None and found != device.kind:
            text = f"{device.name} is said to be a {device.kind}, and {name}:{number} is a {found}"
            remedy = "correct its kind in the cluster file: plans by data sheets are made for another device"
            yield line_of("cluster", where, text, remedy)


def _room(facts: MachineFacts, where: str) -> Iterator[CheckLine]:
    if facts.free_bytes is not None and facts.memory_bytes is not None:
        text = f"{format_bytes(facts.free_bytes)} of {format_bytes(facts.memory_bytes)} free"
        low = facts.free_bytes < _LEAST_MEMORY_BYTES
        remedy = "end other programs; torch alone takes over a GiB a worker" if low else ""
        yield line_of("memory", where, text, remedy)
    if facts.home_problem:
        remedy = "give its user a home folder to write to: code and caches are kept there"
        yield line_of("disk", where, f"home folder {facts.home_problem}", remedy, fails=True)
    free = facts.disk_free_bytes
    room = "make room in the home folder's file system: checkpoints and caches go there"
    remedy = room if free < _LEAST_DISK_BYTES else ""
    yield line_of("disk", where, f"{format_bytes(free)} free", remedy, fails=free < _NO_DISK_BYTES)


def _curve(facts: MachineFacts, where: str) -> Iterator[CheckLine]:
    rate = facts.curve_bytes_per_s
    if rate is None:
        return  # without pyzmq; that is told of SpanTrain's own installation
    if rate == 0:
        remedy = "install pyzmq's own wheel: pip install --force-reinstall pyzmq"
        yield line_of("encryption", where, "libzmq has no CURVE", remedy, fails=True)
        return
    slow = rate < _SLOW_CURVE_BYTES_PER_S
    remedy = "install pyzmq's own wheel, which has libsodium: pip install --force-reinstall pyzmq" if slow else ""
    text = f"CURVE carries {format_bandwidth(rate)} on one core" + (
        ", as libzmq does without libsodium" if slow else ""
    )
    yield line_of("encryption", where, text, remedy)


def _testbed(facts: MachineFacts, where: str) -> Iterator[CheckLine]:
    remedies = {
        "tun": "modprobe tun; chmod 666 /dev/net/tun (its usual mode); in a container --device /dev/net/tun",
        "namespaces": "run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0",
    }
    lacks = {what: text for what, text in facts.testbed.items() if text}
    for what, text in lacks.items():
        yield line_of("testbed", where, text, f"{remedies.get(what, '')}; without it: --no-network")
    if facts.testbed and not lacks:
        yield line_of("testbed", where, "networks can be emulated here")


def common_lines(machines: Sequence[FoundMachine], paths: Sequence[str]) -> Iterator[CheckLine]:
    """Yield what should be alike on all machines and is not: code, data, versions."""
    for what in ("spantrain", *paths):
        digests = {one.machine.name: one.facts.digests[what] for one in machines if what in one.facts.digests}
        yield from _alike("code" if what == "spantrain" else "data", what, digests)
    for package in ("torch", "transformers"):
        versions = {one.machine.name: one.facts.packages.get(package, "") for one in machines}
        versions = {name: version.partition("+")[0] for name, version in versions.items() if version}
        if len(set(versions.values())) > 1:
            remedy = "install the same version everywhere: results may differ"
            yield line_of("versions", "all", f"{package}: {_told(versions)}", remedy)


def _alike(check: str, what: str, digests: Mapping[str, str]) -> Iterator[CheckLine]:
    bad = {name: text for name, text in digests.items() if text == "missing" or text.startswith("unreadable")}
    for name, text in bad.items():
        remedy = "copy it there, e.g. with rsync; relative paths begin at the home folder"
        yield line_of(check, name, f"{what}: {text}", remedy, fails=True)
    good = {name: text for name, text in digests.items() if name not in bad}
    if len(set(good.values())) > 1:
        remedy = "copy one machine's to the others, e.g. with rsync -a --delete"
        yield line_of(check, "all", f"{what} differs: {_told(good)}", remedy, fails=True)
    elif good and not bad:
        whose = f"{len(good)} machines" if len(good) > 1 else next(iter(good))
        yield line_of(check, "all", f"{what}: {next(iter(good.values()))} on {whose}")


def _told(values: Mapping[str, str]) -> str:
    """Return which machines have which value, the most usual first."""
    by_value = Counter(values.values())
    parts = [
        f"{value} on {', '.join(name for name in values if values[name] == value)}"
        for value, _ in by_value.most_common()
    ]
    return "; ".join(parts)


def way_lines(names: Sequence[str], ways: Mapping[Pair, PairReport]) -> Iterator[CheckLine]:
    """Yield what was found between each two machines."""
    for one, other in pairs_of(names):
        there, back = ways[one, other], ways[other, one]
        for source, target, way in ((one, other, there), (other, one, back)):
            yield _port(source, target, way, other_way=back if way is there else there)
        best = there if there.is_open else back
        if best.is_open:
            yield from _translation(one, other, there, back)
            yield from _packets(one, other, there, back)
            offset_s = there.clock_offset_s if there.is_open else -back.clock_offset_s
            yield _clock(one, other, offset_s)
            yield _rate(one, other, best, swapped=best is back)


def _port(source: str, target: str, way: PairReport, *, other_way: PairReport) -> CheckLine:
    where = f"{source}->{target}"
    if way.is_open:
        return line_of("ports", where, f"reaches {way.address}")
    tried = "; ".join(f"{address}: {why}" if address else why for address, why in way.errors.items())
    text = f"{source} cannot connect to {target} ({tried})" + ("; the other way it can" if other_way.is_open else "")
    silent = any("no answer" in why for why in way.errors.values())
    first = f"let {target}'s firewall pass TCP from {source} to all ports" if silent else f"give {target} an address"
    tunnel = "or join both by a tunnel (WireGuard, Tailscale); workers dial one another both ways"
    remedy = f"{first} (a cluster file's `address` is the one that is dialled), {tunnel}"
    return line_of("ports", where, text, remedy, fails=True)


def _translation(one: str, other: str, there: PairReport, back: PairReport) -> Iterator[CheckLine]:
    for source, target, way in ((one, other, there), (other, one, back)):
        if way.is_open and way.seen_address != way.local_address:
            text = f"{target} sees {source} as {way.seen_address}, which is {way.local_address} at home"
            remedy = f"give {source}'s workers --data-address ADDRESS, by which {target} reaches it"
            yield line_of("nat", f"{source}->{target}", text, remedy)


def _packets(one: str, other: str, there: PairReport, back: PairReport) -> Iterator[CheckLine]:
    """Yield what is said of the largest packets; silence where no datagram came back."""
    for source, target, way in ((one, other, there), (other, one, back)):
        where, most, own = f"{source}->{target}", way.path_mtu, way.interface_mtu
        if not way.is_open or own is None:
            continue
        if most is None:
            yield line_of("mtu", where, "no datagram came back, so the largest packet is not known")
        elif most < own:
            text = f"packets of {most} bytes pass, and the interface sends {own}: larger ones are lost or divided"
            remedy = f"on {source}: ip link set dev INTERFACE mtu {most}; or clamp TCP's segments where the way narrows"
            yield line_of("mtu", where, text, remedy, fails=True)
        elif most < _USUAL_MTU:
            text = f"packets of {most} bytes at most, as tunnels have them"
            remedy = "raise the tunnel's MTU if the network below has room (1420 for WireGuard over 1500)"
            yield line_of("mtu", where, text, remedy)
        else:
            yield line_of("mtu", where, f"packets of {most} bytes")


def _clock(one: str, other: str, offset_s: float) -> CheckLine:
    where, size = f"{one}->{other}", format_seconds(abs(offset_s))
    if abs(offset_s) < _CLOCK_S:
        return line_of("clock", where, f"clocks differ by {size}")
    ahead, behind = (other, one) if offset_s > 0 else (one, other)
    text = f"{ahead}'s clock is {size} ahead of {behind}'s: logs and traces cannot be laid beside each other"
    return line_of("clock", where, text, "set both by NTP: timedatectl set-ntp true, or chronyc makestep")


def _rate(one: str, other: str, way: PairReport, *, swapped: bool) -> CheckLine:
    up, down = way.up_bytes_per_s, way.down_bytes_per_s
    there, back = (down, up) if swapped else (up, down)
    text, remedy = f"{format_seconds(way.round_trip_s)} there and back", ""
    if there is not None and back is not None and min(there, back) >= 0:
        text += f", {format_bandwidth(there)} there, {format_bandwidth(back)} back, over one connection"
        if min(there, back) < _SLOW_BYTES_PER_S:
            remedy = (
                "a plan over it seldom pays: see `spantrain plan` and `spantrain outer`, or what else uses the line"
            )
    return line_of("rate", f"{one}->{other}", text, remedy)
