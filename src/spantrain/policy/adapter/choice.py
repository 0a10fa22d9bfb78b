"""The adapters by the names that users give."""

from spantrain.core.job import ADAPTERS
from spantrain.core.plan import Plan
from spantrain.policy.adapter.boundary import AutoBoundary, AutoSettings, BoundaryAdapter, Forecast
from spantrain.policy.adapter.local import AutoLocal, LocalAdapter
from spantrain.policy.adapter.paper import PaperBoundary, PaperLocal
from spantrain.policy.adapter.state import expected_links

__all__ = ["make_boundary", "make_local"]


def make_local(name: str, plan: Plan, device: str) -> LocalAdapter:
    """Return the adapter of a device that leads a replica, for the steps under a plan.

    Raises:
        ValueError: there is no such adapter.
    """
    expected = expected_links(plan, device)
    match _known(name):
        case "auto":
            return AutoLocal(expected)
        case "paper":
            stage, _ = plan.place(device)
            after = plan.stages[stage + 1].replicas if stage + 1 < len(plan.stages) else ()
            return PaperLocal(expected, forward_to=frozenset(replica.devices[0] for replica in after))
        case _:
            return LocalAdapter(expected)


def make_boundary(
    name: str, plan: Plan, forecast: Forecast, settings: AutoSettings | None = None
) -> BoundaryAdapter | None:
    """Return what decides between the steps of a run that begins with a plan; None: nothing does.

    Raises:
        ValueError: there is no such adapter.
    """
    match _known(name):
        case "auto":
            return AutoBoundary(plan, forecast, settings)
        case "paper":
            return PaperBoundary(plan)
        case _:
            return None


def _known(name: str) -> str:
    if name not in ADAPTERS:
        raise ValueError(f"no adapter is called {name!r}; there are {', '.join(ADAPTERS)}")
    return name
