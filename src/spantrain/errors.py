"""The exception tree.

SpanTrainError
├── UsageError              the user's input is wrong: exit code 2, one message, no traceback
│   ├── ConfigError         a file has bad fields (all of them in one message)
│   ├── ProfileError        a profile is missing, foreign or lacks what is asked
│   ├── PlanError           a plan is missing, foreign or not consistent
│   ├── InfeasiblePlanError nothing fits: the numbers are in the message
│   └── TestbedError        the emulated network cannot be built or does not exist
├── ProtocolError           a peer sent something that the protocol does not allow
├── ScheduleError           an order of work breaks a dependency
├── PeerLostError           a device, coordinator or link went away: exit code 1
├── WorkerError             a worker failed: exit code 1, the device and its log are named
├── InternalError           SpanTrain itself failed: exit code 70, where the traceback is is named
└── Interrupted             the user asked to stop: exit code 130
"""


class SpanTrainError(Exception):
    """Anything that SpanTrain reports on purpose."""

    exit_code = 1


class UsageError(SpanTrainError):
    """The user's input is wrong; the message says what, where and what to do."""

    exit_code = 2


class ConfigError(UsageError):
    """A file or option has bad fields; the message lists all of them."""


class ProfileError(UsageError):
    """A profile is missing, foreign, or does not hold what is asked of it."""


class PlanError(UsageError):
    """A plan is missing, foreign, or not consistent."""


class InfeasiblePlanError(UsageError):
    """No plan fits the devices; the message has the numbers."""


class TestbedError(UsageError):
    """The emulated network cannot be built, or is not there."""

    __test__ = False


class ProtocolError(SpanTrainError):
    """A peer sent something that the protocol does not allow."""


class ScheduleError(SpanTrainError):
    """An order of work breaks a dependency or leaves work out."""


class PeerLostError(SpanTrainError):
    """A device, coordinator or link went away."""


class WorkerError(SpanTrainError):
    """A worker failed; the message names the device and its log."""


class InternalError(SpanTrainError):
    """SpanTrain itself failed; the message names the file that has the traceback."""

    exit_code = 70


class Interrupted(SpanTrainError):
    """The user asked to stop; what could be saved was saved."""

    exit_code = 130
