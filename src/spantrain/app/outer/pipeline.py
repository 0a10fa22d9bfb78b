"""A training run as one cluster of an outer optimizer: as `spantrain outer run` says."""

import os
from collections.abc import Mapping

from spantrain.app.training.session import Session
from spantrain.core.outer.stages import OuterCluster
from spantrain.errors import ConfigError
from spantrain.outer.client.environment import ClientEnvironment

_INNER_STEPS = 64


def outer_cluster(variables: Mapping[str, str] = os.environ) -> OuterCluster | None:
    """Return as whom this command was started by `spantrain outer run`; None if it was not.

    Raises:
        UsageError: its variables are not whole.
    """
    if not variables.get("SPANTRAIN_OUTER_MASTER"):
        return None
    found = ClientEnvironment.read(variables)
    return OuterCluster(
        master=found.master,
        token=found.token,
        cluster=found.cluster,
        inner_steps=found.inner_steps or _INNER_STEPS,
        encrypted=found.encrypted,
    )


def check_outer(session: Session) -> None:
    """Make sure that a run can be a cluster.

    Raises:
        ConfigError: its devices reach no master.
    """
    if session.testbed:
        raise ConfigError(
            "this run cannot be a cluster of an outer optimizer: its devices are in an emulated network, which leads "
            "to no master (--no-network)"
        )
