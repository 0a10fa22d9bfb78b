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
    stage, _ = plan.place(device)
    after = plan.stages[stage + 1].replicas if stage + 1 < len(plan.stages) else ()
    leaders = frozenset(replica.devices[0] for replica in after)
    match _known(name):
        case "auto":
            return AutoLocal(expected, after=leaders)
        case "paper":
            return PaperLocal(expected, after=leaders)
        case _:
            return LocalAdapter(expected)


def make_boundary(
    name: str,
    plan: Plan,
    forecast: Forecast,
    settings: AutoSettings | None = None,
    replanner: Replanner | None = None,
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
    number, replica = plan.place(device)
    stage, first = plan.stages[number], max(0, number - 1)
    formats = [other.wire_format for other in plan.stages[first : number + 1]]
    return stage.units, stage.recompute, stage.replicas[replica].devices, formats


def _known(name: str) -> str:
    if name not in ADAPTERS:
        raise ValueError(f"no adapter is called {name!r}; there are {', '.join(ADAPTERS)}")
    return name
