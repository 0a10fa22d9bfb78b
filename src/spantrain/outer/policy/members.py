"""Who is there, and who has not been heard of for too long."""


class Liveness:
    """Names, and when each was last heard of.

    >>> members = Members(lost_after_s=10.0)
    >>> members.heard(0.0, "a"); members.heard(4.0, "b")
    >>> members.silent(11.0), members.next_limit_s
    ({'a': 11.0}, 10.0)
    """

    def __init__(self, *, lost_after_s: float) -> None:
        if not lost_after_s > 0:
            raise ValueError(f"lost_after_s must be positive, got {lost_after_s}")
        self._lost_after_s = lost_after_s
        self._heard_s: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._heard_s

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there, sorted."""
        return tuple(sorted(self._heard_s))

    @property
    def next_limit_s(self) -> float | None:
        """When the next is lost, if it is not heard of before."""
        return min(self._heard_s.values()) + self._lost_after_s if self._heard_s else None

    def heard(self, now_s: float, name: str) -> None:
        """Note a sign of life; whoever was not there is from now on."""
        self._heard_s[name] = now_s

    def forget(self, name: str) -> None:
        """Take out one that went."""
        self._heard_s.pop(name, None)

    def silent(self, now_s: float) -> dict[str, float]:
        """Return who is lost by now, with the seconds since it was heard of, longest first."""
        waited = {name: now_s - heard_s for name, heard_s in self._heard_s.items()}
        lost = {name: silent_s for name, silent_s in waited.items() if silent_s >= self._lost_after_s}
        return dict(sorted(lost.items(), key=lambda entry: (-entry[1], entry[0])))
