"""Three places in a row, as network namespaces: the one in the middle is reached by both others."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spantrain.testbed.testbed import why_unavailable


def quietly(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def inside(name: str) -> tuple[str, ...]:
    """Return the words before a command that is to run in a network namespace."""
    return "ip", "netns", "exec", name


@contextlib.contextmanager
def three_places(folder: Path, *, forwards: bool, far_mtu: int = 1500) -> Iterator[list[str]]:
    """Give names of a (10.77.1.2), r (10.77.1.1, 10.77.2.1) and b (10.77.2.2); skips where that cannot be.

    `forwards`: whether r lets a and b through to each other; `far_mtu`: of packets between r and b.
    """
    if why_unavailable() is not None or not shutil.which("ip"):
        pytest.skip(why_unavailable() or "needs ip (Debian's iproute2)")
    names = [f"spantrain-{folder.name[-8:]}-{place}" for place in "arb"]
    try:
        for name in names:
            quietly("ip", "netns", "add", name)
            quietly("ip", "-n", name, "link", "set", "lo", "up")
        a, r, b = names
        for left, right, network, mtu in ((a, r, "10.77.1", 1500), (b, r, "10.77.2", far_mtu)):
            port = f"to{network[-1]}"
            pair = ("ip", "-n", left, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", right)
            quietly(*pair)
            for place, device, address in ((left, "eth0", f"{network}.2/24"), (right, port, f"{network}.1/24")):
                quietly("ip", "-n", place, "address", "add", address, "dev", device)
                quietly("ip", "-n", place, "link", "set", device, "mtu", str(mtu), "up")
            quietly("ip", "-n", left, "route", "add", "default", "via", f"{network}.1")
        quietly("ip", "netns", "exec", r, "sh", "-c", f"echo {forwards:d} > /proc/sys/net/ipv4/ip_forward")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot make namespaces: {error.stderr.decode()[-200:]}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
