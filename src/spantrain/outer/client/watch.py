"""Says when a cluster has had no new version for long, what it waits for, and when that is over.

How long is too long its own rounds tell, in inner steps; time that it stood still counts for as many as it takes in it.
Of what is shorter than the silence after which a member is lost nothing is said.
"""

import logging
import time
from collections.abc import Callable

from spantrain.outer.client.session import ClientSession
from spantrain.outer.policy.overdue import Overdue
from spantrain.outer.policy.settings import OuterSettings

_LOG = logging.getLogger(__name__)


class VersionWatch:
    """For the training loop's thread; says it once, and again whenever twice as much has passed."""

    def __init__(
        self, session: ClientSession, *, inner_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._session, self._clock = session, clock
        self._version = Overdue(least=inner_steps)
        self._at, self._begun_from = 0.0, 0
        self._steps, self._waited_s = 0, 0.0
        self._begun_s = self._came_s = clock()

    def step(self) -> None:
        """Count an inner step."""
        self._steps += 1
        self._passed(1)

    def waited(self, seconds: float) -> None:
        """Count the time of a wait in which no step could be taken."""
        self._waited_s += seconds
        took_s = self._clock() - self._begun_s - self._waited_s
        if self._steps and took_s > 0:
            self._passed(seconds * self._steps / took_s)

    def _passed(self, steps: float) -> None:
        self._at += steps
        since_s = self._clock() - self._came_s
        settings = self._session.data.settings if self._session.data else OuterSettings()
        if since_s >= settings.lost_after_s and self._version.says(self._at):
            _LOG.warning(
                "cluster %s has had no new version for %.0f inner steps (%.3g s), usually it takes %.0f: it trains on "
                "from version %d by itself, and waits for %s",
                self._session.name, self._at - self._version.last, since_s, self._version.usual,
                self._begun_from, self._session.waits_for(),
            )  # fmt: skip

    def came(self, version: int) -> None:
        """Note a version."""
        late = self._version.came(self._at)
        if late is not None:
            took_s = self._clock() - self._came_s
            _LOG.warning(
                "cluster %s has version %d, after %.0f inner steps (%.3g s)", self._session.name, version, late, took_s
            )
        self._came_s, self._begun_from = self._clock(), version
