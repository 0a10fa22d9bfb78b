"""Whether emulated devices had the time that emulation needs, and what to do if not."""

from spantrain.core.cluster import Cluster

__all__ = ["MOST_REAL_COMPUTE", "SOUND_REAL_COMPUTE", "too_fast"]

SOUND_REAL_COMPUTE = 0.1
"""Real seconds per emulated second under which the machine below is hardly felt (DESIGN section 7)."""

MOST_REAL_COMPUTE = 0.3
"""Above this, times are this machine's rather than the emulated kind's."""


def too_fast(cluster: Cluster, ratio: float) -> str:
    """Say that real computation took too much of the emulated time, and which speed would leave it enough."""
    speed = cluster.emulated_speed * SOUND_REAL_COMPUTE / ratio
    return (
        f"Note: real computation took up to {ratio:.0%} of the emulated devices' time (it should be about "
        f"{SOUND_REAL_COMPUTE:.0%}), so times and predictions are partly this machine's. Gradients and losses are not "
        f"touched. Slower emulated devices mend it: spantrain profile ... --emulated-speed {speed:.1g}"
    )
