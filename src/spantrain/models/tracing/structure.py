"""Which modules of a model are blocks, which run as they are, and which only hold them, so that cuts lie between."""

from dataclasses import dataclass, replace

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The modules that are looked into; all others run as they are."""

    opened: frozenset[str]
    """Paths of modules whose forward is written down; the model itself is the empty path."""
    nested: frozenset[str] = frozenset()
    """Those of them that are elements of a list themselves: opened only if cuts in them are as small as around."""
    elements: frozenset[str] = frozenset()
    """Elements of the lists that are in the opened modules: blocks, also where they have no modules in them."""

    def without(self, path: str) -> "Structure":
        """Return it with one module closed, and all in it."""
        inside = f"{path}."
        kept = frozenset(name for name in self.opened if name != path and not name.startswith(inside))
        elements = frozenset(name for name in self.elements if not name.startswith(inside))
        return replace(self, opened=kept, nested=self.nested & kept, elements=elements)


def is_composite(module: nn.Module) -> bool:
    """Whether a module is made of others."""
    return next(module.children(), None) is not None


def find_structure(model: nn.Module) -> Structure:
    """Open the modules on the way to every outermost list, and elements of lists that have lists of like elements.

    A list is a `ModuleList` or `Sequential`. A model without any is opened itself, and no further.
    """
    opened, nested, elements = {""}, set(), set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        for list_path, members in _worth_opening(_outermost_lists(path, module)):
            opened.update(_between(path, list_path))
            for name, element in members.named_children():
                element_path = f"{list_path}.{name}" if list_path else name
                elements.add(element_path)
                if any(_alike(inner) for _, inner in _outermost_lists(element_path, element)):
                    opened.add(element_path)
                    nested.add(element_path)
                    waiting.append((element_path, element))
    return Structure(opened=frozenset(opened), nested=frozenset(nested), elements=frozenset(elements))


def _worth_opening(lists: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out lists of plain layers (a stem, a classifier) where there are lists of larger modules."""
    rows = [entry for entry in lists if any(is_composite(child) for child in entry[1].children())]
    return rows or lists


def _outermost_lists(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [(path, module)] if len(module) > 1 or any(is_composite(child) for child in module) else []
    found = []
    for name, child in module.named_children():
        found += _outermost_lists(f"{path}.{name}" if path else name, child)
    return found


def _alike(members: nn.Module) -> bool:
    """Whether a list is a row of composite modules of one class."""
    classes = [type(child) for child in members.children() if is_composite(child)]
    return bool(classes) and len(set(classes)) == 1 and len(classes) == sum(1 for _ in members.children())


def _between(start: str, end: str) -> set[str]:
    """Return the paths from below `start` to `end`, both included."""
    words = end.split(".") if end else []
    return {".".join(words[:count]) for count in range(len(words) + 1)} - {start} | {start}
