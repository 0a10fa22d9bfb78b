"""What a coordinator knows of its workers by who has started them."""

from collections.abc import Mapping


def join_command(join: str, token: str, device: str) -> str:
    """Return what to run on a device's machine; the token is not among its options, which others there can see."""
    return f"SPANTRAIN_TOKEN={token} spantrain worker --join {join} --name {device}"


class WorkerStarter:
    """Whoever has started the workers: here people, of whom nothing is heard."""

    def check(self) -> None:
        """Raise what ends everything; asked again and again."""

    def ended(self) -> Mapping[str, str]:
        """Return, by device, how workers have ended since this was asked last: silence need not be waited for."""
        return {}

    def where_is_log(self, device: str) -> str:
        """Return where a worker's output goes."""
        del device
        return "what its worker has printed, on its own machine"
