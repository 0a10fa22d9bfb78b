"""What a step sends over each link and out of each host, read from the testbed's own counters."""

import re
from collections.abc import Mapping
from subprocess import PIPE

from spantrain.core.cluster import Cluster
from spantrain.testbed.testbed import Testbed

_COUNTERS = "/proc/net/dev"


class StepTraffic:
    """Counts between the end of the warm-up and the end of a run, so that what comes before the steps is not in it."""

    def __init__(self, testbed: Testbed | None, cluster: Cluster, devices: tuple[str, ...], warm_up_steps: int) -> None:
        """Count on a testbed; on loopback there is nothing to read.

        Args:
            testbed: where the workers live.
            cluster: of the testbed.
            devices: that take part: hosts of others are not looked at.
            warm_up_steps: after so many steps counting begins.
        """
        self._testbed = testbed
        self._hosts = list(dict.fromkeys(cluster.device_by_name[name].host for name in devices))
        self._warm_up_steps = warm_up_steps
        self._before: tuple[dict[str, int], dict[str, int]] | None = None
        self._steps_before = 0
        self._steps = 0

    def note(self, steps_done: int) -> None:
        """Hear that so many steps are done."""
        self._steps = steps_done
        if self._before is None and steps_done >= self._warm_up_steps:
            self._before, self._steps_before = self._read(), steps_done

    def per_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes of a step by link and by host, up to now."""
        steps = self._steps - self._steps_before
        if self._before is None or steps < 1:
            return {}, {}
        links, hosts = (_differences(now, was, steps) for now, was in zip(self._read(), self._before, strict=True))
        return links, hosts

    def _read(self) -> tuple[dict[str, int], dict[str, int]]:
        if self._testbed is None:
            return {}, {}
        links = {f"{link.source}->{link.target}": link.bytes_sent for link in self._testbed.status().links}
        return links, {host: self._sent_by(host) for host in self._hosts}

    def _sent_by(self, host: str) -> int:
        assert self._testbed is not None
        with self._testbed.popen(host, ["cat", _COUNTERS], stdout=PIPE) as process:
            assert process.stdout is not None
            text = process.stdout.read().decode()
        return sent_bytes(text, self._testbed.interface(host))


def sent_bytes(counters: str, interface: str) -> int:
    """Return what an interface has sent, from the text of /proc/net/dev.

    >>> sent_bytes("  eth0: 10 1 0 0 0 0 0 0 77 2 0 0 0 0 0 0", "eth0")
    77
    """
    found = re.search(rf"^\s*{re.escape(interface)}:(.*)$", counters, re.MULTILINE)
    return int(found[1].split()[8]) if found else 0


def _differences(now: Mapping[str, int], before: Mapping[str, int], steps: int) -> dict[str, float]:
    return {name: (size - before.get(name, 0)) / steps for name, size in now.items()}
