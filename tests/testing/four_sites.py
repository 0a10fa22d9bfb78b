"""Four stages on four sites, one device each, with links all alike: what SpanTrain's paper has in its figure 12a."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device, Host, Link, Site
from spantrain.core.plan import Plan
from spantrain.core.span import equal_spans
from spantrain.core.speed import SpeedTrace
from testing.made_up_costs import MadeUpCosts
from testing.plans import plan_of

STAGES = 4
LATENCY_S = 0.02
PAIRS = tuple((k, other) for k in range(STAGES) for other in (k - 1, k + 1) if 0 <= other < STAGES)


def costs(transfer_s: float, *, work_s: float = 0.01) -> MadeUpCosts:
    """A sample is a byte and takes `transfer_s` of a link; each of F, I and W takes `work_s` for it."""
    return MadeUpCosts(
        sample_s=(dict.fromkeys((Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), work_s),) * STAGES,
        latency_s=(LATENCY_S,) * (STAGES - 1),
        forward_s=(transfer_s,) * (STAGES - 1),
        backward_s=(transfer_s,) * (STAGES - 1),
        action_overhead_s=0.002,
        commit_s=2 * LATENCY_S,
    )


def plan(transfer_s: float, *, samples: int = 64, size: int = 8, schedule: str = "critical-path") -> Plan:
    """A plan whose cluster says the same of the links as the costs do."""
    made = plan_of([(equal_spans(samples, size), [1.0], [samples])] * STAGES, schedule)
    return replace(made, cluster=_cluster(made.cluster, made.devices, 1 / transfer_s))


def _cluster(cluster: Cluster, names: Sequence[str], rate: float) -> Cluster:
    return replace(
        cluster,
        sites=tuple(Site(name=name, hosts=(f"h{name}",), bandwidth_bytes_per_s=1e9, latency_s=0.0) for name in names),
        hosts=tuple(Host(name=f"h{name}", site=name, devices=(name,)) for name in names),
        devices=tuple(_moved(device) for device in cluster.devices),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=rate, latency_s=LATENCY_S) for a, b in permutations(names, 2)
        ),
    )


def _moved(device: Device) -> Device:
    return replace(device, host=f"h{device.name}", site=device.name)


def all_links(*changes: tuple[float, float]) -> Mapping[str, SpeedTrace]:
    """The same changes on every link."""
    return {f"{a}->{b}": SpeedTrace(changes=changes) for a, b in PAIRS}
