"""Linux calls that Python 3.11 lacks: leave and enter namespaces, open TUN devices."""

import ctypes
import fcntl
import os
import struct

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
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
    _call("unshare", _CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_network(namespace_fd: int) -> None:
    """Move this thread into a network namespace."""
    _call("setns", namespace_fd, _CLONE_NEWNET)


def new_user() -> None:
    """Move this process into a new user namespace in which it is root; nothing is gained outside of it."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def open_tun(name: str) -> int:
    """Create a TUN device in this process's network namespace; it lives as long as the returned file."""
    tun_fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun_fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_BARE_WITH_OFFLOAD_HEADER))
    set_segmentation(tun_fd, joined=True)
    return tun_fd


def set_segmentation(tun_fd: int, *, joined: bool) -> None:
    """Choose whether the kernel hands over TCP packets of one flow joined (up to 64 kB) or one by one."""
    fcntl.ioctl(tun_fd, _TUNSETOFFLOAD, _TUN_F_CSUM | (_TUN_F_TSO4_AND_ECN if joined else 0))


def fine_timers() -> None:
    """Ask for wake-ups within a microsecond of the time asked for (the default is 50)."""
    _call("prctl", _PR_SET_TIMERSLACK, 1000, 0, 0, 0)
