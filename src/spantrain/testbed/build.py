"""A testbed's layout (which host gets which address), and how it is built.

Hosts are on veth pairs to their site's switch, a TUN device is the site's way out. With the Linux calls that Python
3.11 lacks: leave and enter namespaces, open TUN devices.
"""

import ctypes
import fcntl
import os
import struct
import subprocess
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from errno import EPERM
from pathlib import Path

from spantrain.core.cluster import Cluster, Link, Site
from spantrain.core.records import Record
from spantrain.errors import TestbedError
from spantrain.testbed.namespace_handle import CLONE_NEWNET, CLONE_NEWUSER

HOST_INTERFACE = "eth0"
_HOSTS_PER_BLOCK = 250
_MAX_SITES = 250


class NetworkLayout(Record):
    """Everything that the router builds; the first site's addresses are 10.1.0.0/16, those of the next 10.2.0.0/16."""

    testbed_id: str
    cluster: str
    sites: tuple[Site, ...]
    address_of: Mapping[str, str]
    """By host."""
    links: tuple[Link, ...]
    parent_pid: int | None
    """End when this process ends; None: stay until asked."""


def lay_out(cluster: Cluster, *, testbed_id: str, parent_pid: int | None) -> NetworkLayout:
    """Give addresses to all hosts of a cluster.

    Raises:
        TestbedError: More sites than addresses, a host without a site, a link to nowhere or two links for one pair.
    """
    problems = _problems(cluster)
    if problems:
        raise TestbedError(f"cluster {cluster.name} cannot be emulated: {'; '.join(problems)}")
    sites, address_of = [], {}
    for number, site in enumerate(cluster.sites, start=1):
        hosts = tuple(host.name for host in cluster.hosts if host.site == site.name)
        sites.append(replace(site, hosts=hosts))
        for rank, name in enumerate(hosts):
            address_of[name] = f"10.{number}.{rank // _HOSTS_PER_BLOCK}.{rank % _HOSTS_PER_BLOCK + 2}"
    return NetworkLayout(
        testbed_id=testbed_id, cluster=cluster.name, sites=tuple(sites), address_of=address_of, links=cluster.links,
        parent_pid=parent_pid,
    )  # fmt: skip


def gateway(site_number: int) -> str:
    """Return the address of a site's switch, which is its way out; sites are numbered from 1."""
    return f"10.{site_number}.0.1"


def _problems(cluster: Cluster) -> list[str]:
    known = {site.name for site in cluster.sites}
    problems = [f"host {host.name} is at site {host.site}, which is not there" for host in cluster.hosts
                if host.site not in known]  # fmt: skip
    for link in cluster.links:
        if link.source == link.target:
            problems.append(f"link {link.source} -> {link.target} joins a site with itself")
        problems += [
            f"link {link.source} -> {link.target}: no site {end}" for end in {link.source, link.target} - known
        ]
    pairs = Counter((link.source, link.target) for link in cluster.links)
    problems += [f"{count} links {source} -> {target}" for (source, target), count in pairs.items() if count > 1]
    if len(cluster.sites) > _MAX_SITES:
        problems.append(f"{len(cluster.sites)} sites; at most {_MAX_SITES} have addresses")
    return problems


MTU_BYTES = 9000
"""Large, so that headers take 0.6 % of a link; not larger, since at 10 Mbit/s one such packet takes 7 ms."""
_WIRE_OVERHEAD_RATIO = (MTU_BYTES + 14) / MTU_BYTES
_MIN_MTU_BYTES = 1500
_PACKET_S = 0.01
"""A packet takes no longer on the slowest way of its site, unless it has the least size."""
_PORT_BURST_S = 0.01
"""What a slow port passes at once: seldom and small messages would not feel its rate if it had saved up for more."""
_PORT_BURST_BYTES = 131072
_PORT_QUEUE_S = 0.05
_SYSCTLS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv4/tcp_rmem": "4096 131072 67108864",
    "ipv4/tcp_wmem": "4096 131072 67108864",
    # What the last connection saw says nothing after a re-shape.
    "ipv4/tcp_no_metrics_save": "1",
    # Training is silent between steps; hosts set up for long fat paths do not start slowly after each silence.
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_min_tso_segs": "1",
}


class Built(Record):
    """Open files that keep everything alive."""

    site_fds: tuple[int, ...]
    host_fds: dict[str, int]
    tun_fds: tuple[int, ...]
    has_user_namespace: bool

    @property
    def networks(self) -> dict[int, int]:
        """Inode of each network namespace, by its file."""
        return {fd: os.fstat(fd).st_ino for fd in (*self.site_fds, *self.host_fds.values())}


def build(layout: NetworkLayout) -> Built:
    """Build all sites; as root in plain namespaces, otherwise in a user namespace of our own.

    Raises:
        TestbedError: With what is missing.
    """
    has_user_namespace = _gain_network_rights()
    site_fds, tun_fds = [], []
    host_fds: dict[str, int] = {}
    for number, site in enumerate(layout.sites, start=1):
        for host in site.hosts:
            host_fds[host] = new_network()
            _set_sysctls(forward=False)
        site_fds.append(new_network())
        _set_sysctls(forward=True)
        tun_fds.append(_open_tun())
        _build_switch(layout, number, host_fds)
        for host in site.hosts:
            _call("setns", host_fds[host], CLONE_NEWNET)
            _build_host(layout, number, host)
    return Built(
        site_fds=tuple(site_fds), host_fds=host_fds, tun_fds=tuple(tun_fds), has_user_namespace=has_user_namespace
    )


def _gain_network_rights() -> bool:
    try:
        os.close(new_network())
    except OSError as error:
        if error.errno != EPERM:
            raise TestbedError(f"no network namespaces on this machine: {error}") from error
    else:
        return False
    uid, gid = os.geteuid(), os.getegid()
    try:
        _call("unshare", CLONE_NEWUSER)  # it is root in there; nothing is gained outside of it
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        os.close(new_network())
    except OSError as error:
        raise TestbedError(
            f"neither root nor allowed a user namespace ({error}); run as root, or allow it "
            "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
        ) from error
    return True


def _open_tun() -> int:
    """Create the way out of a site in this process's network namespace; it lives as long as the returned file."""
    try:
        tun_fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tun_fd, _TUNSETIFF, struct.pack("16sH22x", b"wan0", _IFF_TUN_BARE_WITH_OFFLOAD_HEADER))
        set_segmentation(tun_fd, joined=True)
        return tun_fd
    except OSError as error:
        raise TestbedError(
            f"cannot open a TUN device: {error}; /dev/net/tun must be there (modprobe tun) and be readable and "
            "writable for this user (chmod 666 /dev/net/tun, its usual mode)"
        ) from error


def _set_sysctls(*, forward: bool) -> None:
    values = {**_SYSCTLS, "ipv4/ip_forward": str(int(forward))}
    for name, value in values.items():
        with suppress(FileNotFoundError):  # older kernels lack some; none is needed for things to work
            Path("/proc/sys/net", name).write_text(value)


def _build_switch(layout: NetworkLayout, number: int, host_fds: dict[str, int]) -> None:
    site = layout.sites[number - 1]
    lines = [
        "link set lo up",
        f"link add br0 mtu {MTU_BYTES} type bridge",
        f"addr add {gateway(number)}/16 dev br0",
        "link set br0 up",
        f"link set wan0 mtu {MTU_BYTES} txqueuelen 1000 up",
    ]
    mtu = _mtu_bytes(layout, site)
    for rank, host in enumerate(site.hosts):
        lines += [
            f"link add port{rank} mtu {mtu} type veth peer name {HOST_INTERFACE} mtu {mtu} "
            f"netns /proc/self/fd/{host_fds[host]}",
            f"link set port{rank} master br0 up",
        ]
    for other_number, other in enumerate(layout.sites, start=1):
        joined = any((link.source, link.target) == (site.name, other.name) for link in layout.links)
        route = "dev wan0" if joined else ""
        if other is not site:
            lines.append(f"route add {'' if joined else 'unreachable '}10.{other_number}.0.0/16 {route}")
    _run("ip", lines, tuple(host_fds.values()))
    _run("tc", [_port_shape(f"port{rank}", site, mtu) for rank in range(len(site.hosts))])


def _build_host(layout: NetworkLayout, number: int, host: str) -> None:
    site = layout.sites[number - 1]
    lines = [
        "link set lo up",
        f"addr add {layout.address_of[host]}/16 dev {HOST_INTERFACE}",
        f"link set {HOST_INTERFACE} up",
        f"route add default via {gateway(number)}",
    ]
    _run("ip", lines)
    _run("tc", [_port_shape(HOST_INTERFACE, site, _mtu_bytes(layout, site))])


def _mtu_bytes(layout: NetworkLayout, site: Site) -> int:
    """Return what a packet of a site's hosts may have: on slow ways less, since a whole one passes at once, and what
    comes behind it waits for it.
    """
    lines = [rate for rate in (site.uplink_bandwidth_bytes_per_s, site.downlink_bandwidth_bytes_per_s) if rate]
    links = [link.bandwidth_bytes_per_s for link in layout.links if site.name in (link.source, link.target)]
    slowest = min(site.bandwidth_bytes_per_s, *lines, *links, MTU_BYTES / _PACKET_S)
    return int(max(_MIN_MTU_BYTES, slowest * _PACKET_S))


def _port_shape(interface: str, site: Site, mtu_bytes: int) -> str:
    rate = site.bandwidth_bytes_per_s * _WIRE_OVERHEAD_RATIO
    most = max(_PORT_BURST_BYTES, rate * 0.001)
    burst = int(max(1.1 * (mtu_bytes + 14), min(most, rate * _PORT_BURST_S)))
    limit = int(max(_PORT_BURST_BYTES, burst + rate * _PORT_QUEUE_S))
    return f"qdisc add dev {interface} root tbf rate {int(rate * 8)}bit burst {burst} limit {limit}"


def _run(program: str, lines: list[str], keep_fds: tuple[int, ...] = ()) -> None:
    try:
        done = subprocess.run(
            [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, pass_fds=keep_fds
        )
    except FileNotFoundError as error:
        raise TestbedError(f"the program {program} is missing; install iproute2") from error
    if done.returncode != 0:
        raise TestbedError(f"{program} failed: {' '.join(done.stderr.split())}; its input was: {'; '.join(lines)}")


_PR_SET_TIMERSLACK = 29
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN_BARE_WITH_OFFLOAD_HEADER = 0x0001 | 0x1000 | 0x4000
_TUN_F_CSUM = 0x01
_TUN_F_TSO4_AND_ECN = 0x02 | 0x08


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def new_network() -> int:
    """Move this process into a new network namespace and return an open file that keeps it."""
    _call("unshare", CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def set_segmentation(tun_fd: int, *, joined: bool) -> None:
    """Choose whether the kernel hands over TCP packets of one flow joined (up to 64 kB) or one by one."""
    fcntl.ioctl(tun_fd, _TUNSETOFFLOAD, _TUN_F_CSUM | (_TUN_F_TSO4_AND_ECN if joined else 0))


def fine_timers() -> None:
    """Ask for wake-ups within a microsecond of the time asked for (the default is 50)."""
    _call("prctl", _PR_SET_TIMERSLACK, 1000, 0, 0, 0)
