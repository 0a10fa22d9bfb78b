"""`single-site`: the best site alone (DESIGN idea 6), planned by `spantrain-dp`."""

from spantrain.errors import InfeasiblePlanError
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.spantrain_dp.strategy import candidates

_PER_SITE = 4
"""Plans proposed for a site."""


def single_site(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plans inside each site.

    Raises:
        InfeasiblePlanError: no site can hold the model; each refusal is in the message.
    """
    cluster = request.profile.cluster
    by_site: dict[str, list[str]] = {}
    for name in request.devices_within_quotas:
        by_site.setdefault(cluster.device_by_name[name].site, []).append(name)
    found: list[Proposal] = []
    refusals = []
    for devices in by_site.values():
        try:
            found += candidates(request.profile, request.job, tuple(devices), limit=_PER_SITE)
        except InfeasiblePlanError as error:
            refusals.append(str(error))
    if not found:
        raise InfeasiblePlanError(" ".join(refusals))
    return tuple(found)
