"""All that reads bytes from the network, each with a generator of what a hostile peer might send."""

from fuzz.network_control import CONTROL_TARGETS
from fuzz.network_frames import FRAME_TARGETS
from fuzz.network_machines import MACHINE_TARGETS
from fuzz.network_outer import OUTER_TARGETS
from fuzz.network_runtime import RUNTIME_TARGETS
from fuzz.network_sockets import SOCKET_TARGETS
from fuzz.network_states import STATE_TARGETS
from fuzz.target import Target

TARGETS: tuple[Target, ...] = (
    *FRAME_TARGETS,
    *CONTROL_TARGETS,
    *STATE_TARGETS,
    *OUTER_TARGETS,
    *RUNTIME_TARGETS,
    *SOCKET_TARGETS,
    *MACHINE_TARGETS,
)
