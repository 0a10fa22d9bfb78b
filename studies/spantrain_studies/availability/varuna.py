"""Varuna (Athlur et al., EuroSys 2022): job morphing, a restart with another equal grid at every change.

Kept: D equal pipelines of P stages with equal samples, D and P chosen anew by simulation for the devices present;
the slowest of each stage decides; checkpoints to local disks beside the training, which cost no time; at every change
all stop, morph, and go on from the newest one. In its favour: besides what `layouts` says, checkpoints of lost devices
can be read by all; slow devices are left out where that is faster; a morph for devices that come loses no step and is
only done where steps get shorter by a factor that is tuned. Left out: its own order of work (1F1B or ours in its place)
and the sharing of a stage's checkpoint among replicas.
"""

from spantrain.core.plan import Plan
from spantrain_studies.availability.layouts import Laid, Layouts
from spantrain_studies.availability.likeness import HostSymmetry, with_names
from spantrain_studies.availability.restart import Planner


def grid_planner(layouts: Layouts) -> Planner:
    """Return the planner of equal grids; asked once for all devices that are alike."""
    likeness, names = HostSymmetry(layouts.profile.cluster), layouts.profile.cluster.device_by_name
    known: dict[frozenset[str], Laid | None] = {}

    def planned(present: frozenset[str]) -> tuple[Plan, float] | None:
        renamed = likeness.renamed({name: (0 if name in present else 1,) for name in names})
        key = frozenset(renamed[name] for name in present)
        if key not in known:
            found = layouts.grids(key)
            known[key] = found[0] if found else None
        laid = known[key]
        if laid is None:
            return None
        return with_names(laid.plan, {alias: name for name, alias in renamed.items()}), laid.step_s

    return planned
