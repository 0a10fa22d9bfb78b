"""Groups as lines of text."""

from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes, format_seconds
from spantrain.planner.groups import Group, Groups, message_seconds


def tree_lines(groups: Groups, profile: Profile) -> list[str]:
    """Return the tree of groups: first level, second level, devices, with the metrics that grouped them."""
    metric = message_seconds(profile, groups.message_bytes)
    lines = [f"{profile.cluster.name}: {format_bytes(groups.message_bytes)} message, one way, mean of both directions"]
    for index, group in enumerate(groups.first_level):
        last = index == len(groups.first_level) - 1
        inside = [metric[a, b] for a in group.devices for b in group.devices if (a, b) in metric]
        note = f"inside {format_seconds(sum(inside) / len(inside))}" if inside else "one device"
        lines.append(f"{'└──' if last else '├──'} {group.name}: {note}{_distances(group, groups, metric)}")
        lines += [("    " if last else "│   ") + line for line in _subgroup_lines(group, profile)]
    return lines


def _distances(group: Group, groups: Groups, metric: dict[tuple[str, str], float]) -> str:
    parts = []
    for other in groups.first_level:
        between = [metric[a, b] for a in group.devices for b in other.devices if (a, b) in metric]
        if other is not group and between:
            parts.append(f"to {other.name} {format_seconds(sum(between) / len(between))}")
    return "".join(f", {part}" for part in parts)


def _subgroup_lines(group: Group, profile: Profile) -> list[str]:
    lines = []
    for index, subgroup in enumerate(group.subgroups):
        last = index == len(group.subgroups) - 1
        lines.append(f"{'└──' if last else '├──'} {subgroup.name}")
        indent = "    " if last else "│   "
        for number, name in enumerate(subgroup.devices):
            device = profile.cluster.device_by_name[name]
            branch = "└──" if number == len(subgroup.devices) - 1 else "├──"
            score = profile.score_by_device.get(name)
            text = f"score {score:.3g}" if score is not None else "no score"
            lines.append(f"{indent}{branch} {name}: {device.kind}, {text}, {format_bytes(device.memory_bytes)}")
    return lines
