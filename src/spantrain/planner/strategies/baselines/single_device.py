"""`single-device`: the best device alone (DESIGN idea 6), one of each kind and memory tried."""

from spantrain.errors import InfeasiblePlanError
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.spantrain_dp.strategy import candidates

_SIZES = 2
"""Micro-batch sizes proposed for a device."""


def single_device(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the whole model on each kind of device.

    Raises:
        InfeasiblePlanError: no device can hold the model; each refusal is in the message.
    """
    alike: dict[tuple[str, int, str], str] = {}
    for name in request.devices_within_quotas:
        device = request.profile.cluster.device_by_name[name]
        alike.setdefault((device.kind, device.memory_bytes, device.backend), name)
    found: list[Proposal] = []
    refusals = []
    for name in alike.values():
        try:
            found += candidates(request.profile, request.job, (name,), limit=_SIZES)
        except InfeasiblePlanError as error:
            refusals.append(str(error))
    if not found:
        raise InfeasiblePlanError(" ".join(refusals))
    return tuple(found)
