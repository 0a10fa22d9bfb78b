"""Become a cluster's training command, with what the outer optimizer's client needs in the environment."""

import os
from collections.abc import Mapping, Sequence

from spantrain.errors import ConfigError


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
