"""The adapters by the names that users give."""

from spantrain.adaptation.boundary import AutoBoundary, AutoSettings, BoundaryAdapter, Replanner
from spantrain.adaptation.local import AutoLocal, LocalAdapter
from spantrain.adaptation.network_state import expected_links
from spantrain.adaptation.paper import PaperBoundary, PaperLocal
from spantrain.adaptation.search import Forecast
from spantrain.core.job import ADAPTERS
from spantrain.core.plan import Plan


class LocalAdapters:
    """One device's adapters, plan after plan: what it knows of its links lives on."""

    def __init__(self, name: str, device: str) -> None:
        """Take the name that users give, and the device."""
        self._name = name
        self._device = device
        self._last: tuple[Plan, LocalAdapter] | None = None

    def under(self, plan: Plan) -> LocalAdapter:
        """Return the adapter for the steps under a plan, with what is known from those before."""
        adapter = make_local(self._name, plan, self._device)
        if self._last is not None:
            before, last = self._last
            same_work = _work_of(before, self._device) == _work_of(plan, self._device)
            adapter.take_up(last, same_messages=before.stages == plan.stages, same_work=same_work)
        self._last = plan, adapter
        return adapter


def make_local(name: str, plan: Plan, device: str) -> LocalAdapter:
    """Return the adapter of a device that leads a replica, for the steps under a plan.

    Raises:
        ValueError: there is no such adapter.
    """
    expected = expected_links(plan, device)
    behind = plan.stages[plan.crew_of(device).numbers[0] + 1 :][:1]
    leaders = frozenset(replica.devices[0] for stage in behind for replica in stage.replicas)
    # Of an interleaved pipeline links are watched, and nothing else.
    match _known("off" if plan.interleaved else name):
        case "auto":
            return AutoLocal(expected, after=leaders)
        case "paper":
            return PaperLocal(expected, after=leaders)
        case _:
            return LocalAdapter(expected)


def make_boundary(
    name: str, plan: Plan, forecast: Forecast, settings: AutoSettings | None = None, replanner: Replanner | None = None
) -> BoundaryAdapter | None:
    """Return what decides between the steps of a run that begins with a plan; None: nothing does.

    Raises:
        ValueError: there is no such adapter.
    """
    match _known(name):
        case "auto":
            return AutoBoundary(plan, forecast, settings, replanner)
        case "paper":
            return PaperBoundary(plan, forecast)
        case _:
            return None


def _work_of(plan: Plan, device: str) -> tuple[object, ...]:
    """Return what a sample's seconds on a device and on its links depend on."""
    crew = plan.crew_of(device)
    formats = [other.wire_format for number in crew.numbers for other in plan.stages[max(0, number - 1) : number + 1]]
    recompute = [stage.recompute for stage in crew.stages]
    return crew.units, recompute, crew.first.replicas[crew.replica_index(device)].devices, formats


def _known(name: str) -> str:
    if name not in ADAPTERS:
        raise ValueError(f"no adapter is called {name!r}; there are {', '.join(ADAPTERS)}")
    return name
