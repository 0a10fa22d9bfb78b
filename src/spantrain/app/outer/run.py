"""A cluster's training command: started with what the outer optimizer's client needs in its environment."""

import os
from collections.abc import Mapping, Sequence

from spantrain.app.training.session import Session
from spantrain.core.outer.stages import INNER_STEPS, OuterCluster
from spantrain.errors import ConfigError
from spantrain.outer.client.connect import ClientEnvironment


def client_environment(
    *, master: str, token: str, cluster: str, inner_steps: int, encrypted: bool
) -> Mapping[str, str]:
    """Return what `OuterOptimizer.from_environment` reads, and what gRPC must know before it is loaded."""
    return {
        "SPANTRAIN_OUTER_MASTER": master,
        "SPANTRAIN_OUTER_TOKEN": token,
        "SPANTRAIN_OUTER_CLUSTER": cluster,
        "SPANTRAIN_OUTER_INNER_STEPS": str(inner_steps),
        "SPANTRAIN_OUTER_ENCRYPTED": "1" if encrypted else "0",
        # Its handlers of fork() would end the workers of a DataLoader, which use no gRPC.
        "GRPC_ENABLE_FORK_SUPPORT": "false",
    }


def become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process by a command: its signals, its output and its exit code are then the command's own.

    Raises:
        ConfigError: there is no such command, or it cannot be run.
    """
    try:
        os.execvpe(command[0], list(command), {**os.environ, **environment})
    except FileNotFoundError:
        raise ConfigError(f"{command[0]}: there is no such command; give one that runs here, after `--`") from None
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be run: {error.strerror}") from None


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
        inner_steps=found.inner_steps or INNER_STEPS,
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
