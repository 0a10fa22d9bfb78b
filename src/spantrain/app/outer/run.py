"""A cluster's training command: started with what the outer optimizer's client needs in its environment."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spantrain.core.outer.stages import OuterCluster
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from spantrain.app.session import Session


def become(command: Sequence[str], cluster: OuterCluster) -> None:
    """Replace this process by a cluster's training command: signals, output and exit code are then the command's own.

    Raises:
        ConfigError: there is no such command, or it cannot be run.
    """
    try:
        # gRPC must know before it is loaded: its handlers of fork() would end workers of a DataLoader, which use none.
        environment = {**os.environ, **cluster.variables, "GRPC_ENABLE_FORK_SUPPORT": "false"}
        os.execvpe(command[0], list(command), environment)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]}: there is no such command; give one that runs here, after `--`") from None
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be run: {error.strerror}") from None


def outer_cluster(variables: Mapping[str, str] = os.environ) -> OuterCluster | None:
    """Return as whom this command was started by `spantrain outer run`; None if it was not.

    Raises:
        UsageError: its variables are not whole.
    """
    return OuterCluster.read(variables) if variables.get("SPANTRAIN_OUTER_MASTER") else None


def check_outer(session: "Session") -> None:
    """Make sure that a run can be a cluster.

    Raises:
        ConfigError: its devices reach no master.
    """
    if session.testbed:
        raise ConfigError(
            "this run cannot be a cluster of an outer optimizer: its devices are in an emulated network, which leads "
            "to no master (--no-network)"
        )
