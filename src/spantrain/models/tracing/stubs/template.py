"""What a module returned, and what it changed of what it was given, to be given again by a stub in its place.

Lists, tuples, dictionaries and any objects with attributes are taken apart; tensors that the module made have values in
their place, and what it passed on stands for itself.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spantrain.core.records import Record
from spantrain.models.tracing.tape import Samples, TraceProblem, UnitDevice, Value, version_of

_WHOLE = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, torch.dtype, torch.Generator)
"""What is not taken apart."""
_DEEPEST = 8
"""Containers in each other that are looked into."""

Path = tuple[Any, ...]
"""Keys, indices and names of attributes on the way to a part of a call's arguments."""


@dataclass(frozen=True)
class Given:
    """A part of what the call was given."""

    path: Path


@dataclass(frozen=True)
class Rebuilt:
    """A container with other contents."""

    kind: type
    contents: Mapping[Any, Any]
    """Signs by key, index or name of the attribute."""


class Template(Record):
    """What a call returned, and the contents that it gave to containers which it was given."""

    returned: Any
    changed: tuple[tuple[Path, Rebuilt], ...]

    def leaves(self) -> Iterator[Any]:
        """Yield all signs in it that are no containers."""
        for sign in (self.returned, *(rebuilt for _, rebuilt in self.changed)):
            yield from _leaves(sign)


def contents_of(part: Any) -> Mapping[Any, Any] | None:
    """Return what is in a container; None: it is none."""
    if isinstance(part, _WHOLE) or part is None:
        return None
    if isinstance(part, Mapping):
        return dict(part)
    if isinstance(part, (list, tuple)):
        return dict(enumerate(part))
    if hasattr(part, "__dict__"):
        return dict(vars(part))
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(part, name)]
    return {name: getattr(part, name) for name in slots} if slots and dataclasses.is_dataclass(part) else None


class GivenParts:
    """The containers and tensors that a call was given, as they were before it."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._path: dict[int, tuple[Path, int]] = {}
        self._part: dict[Path, Any] = {}
        self._before: dict[Path, Mapping[Any, Any]] = {}
        for key, part in (*enumerate(args), *kwargs.items()):
            self._enter((key,), part)

    def at(self, path: Path) -> Any:
        """Return what was there before the call."""
        return self._part[path]

    def has(self, part: Any) -> bool:
        """Whether a part was given, or was in something given."""
        return id(part) in self._path

    def _enter(self, path: Path, part: Any) -> None:
        contents = contents_of(part)
        if id(part) in self._path or (contents is None and not isinstance(part, Tensor)):
            return
        self._path[id(part)] = path, version_of(part) if isinstance(part, Tensor) else 0
        self._part[path] = part
        if contents is not None and len(path) < _DEEPEST:
            self._before[path] = contents
            for key, inner in contents.items():
                self._enter((*path, key), inner)

    def template(self, returned: Any, sign_of: Callable[[Tensor], Any]) -> Template:
        """Return what was returned and changed; `sign_of` a tensor that was not given is what stands for it."""
        changed = []
        for path, before in self._before.items():
            part = self._part[path]
            after = contents_of(part) or {}
            if list(before) != list(after) or any(before[key] is not after[key] for key in after):
                contents = {key: self._sign(inner, sign_of) for key, inner in after.items()}
                changed.append((path, Rebuilt(type(part), contents)))
        return Template(returned=self._sign(returned, sign_of), changed=tuple(changed))

    def _sign(self, part: Any, sign_of: Callable[[Tensor], Any], depth: int = 0) -> Any:
        path, version = self._path.get(id(part), (None, 0))
        if path is not None and (not isinstance(part, Tensor) or version_of(part) == version):
            return Given(path)
        if isinstance(part, Tensor):
            return sign_of(part)
        if isinstance(part, torch.device):
            return UnitDevice()
        contents = contents_of(part)
        if contents is None or depth > _DEEPEST:
            return part
        return Rebuilt(type(part), {key: self._sign(inner, sign_of, depth + 1) for key, inner in contents.items()})


def given_again(template: Template, at: Callable[[Path], Any], fill: Callable[[Any], Any]) -> Any:
    """Change what a call is given as the template says, and return what it returned.

    Args:
        template: of the call.
        at: returns a part of what it is given.
        fill: returns what stands for a leaf's sign.
    """

    def built(sign: Any) -> Any:
        if isinstance(sign, Given):
            return at(sign.path)
        if isinstance(sign, Rebuilt):
            return _container(sign.kind, {key: built(inner) for key, inner in sign.contents.items()})
        return fill(sign)

    returned = built(template.returned)
    new = [
        (at(path), {key: built(inner) for key, inner in rebuilt.contents.items()}) for path, rebuilt in template.changed
    ]
    for part, contents in new:
        _set_contents(part, contents)
    return returned


def part_at(args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> Any:
    """Return a part of what a call is given."""
    part = args[path[0]] if isinstance(path[0], int) else kwargs[path[0]]
    for key in path[1:]:
        part = (contents_of(part) or {})[key]
    return part


def made(template: Template, returned: Any, changed: Sequence[Any]) -> Iterator[tuple[Value, Tensor]]:
    """Yield the values of a template with the tensors in their places: of what was returned and of what was changed."""
    yield from _side_by_side(template.returned, returned)
    for (_, rebuilt), part in zip(template.changed, changed, strict=True):
        yield from _side_by_side(rebuilt, part)


def joined(one: Any, other: Any, where: str) -> Any:
    """Return a sign for any number of samples, of those for two numbers of them.

    Raises:
        TraceProblem: what was returned depends on the number of samples.
    """
    if isinstance(one, Rebuilt) and isinstance(other, Rebuilt) and list(one.contents) == list(other.contents):
        return replace(
            one, contents={key: joined(sign, other.contents[key], where) for key, sign in one.contents.items()}
        )
    if type(one) is not type(other) or isinstance(one, Rebuilt):
        raise TraceProblem("what a block returns depends on the number of samples", where=where, module="")
    if type(one) is int and one != other:
        return Samples.seen(one, other)
    if isinstance(one, (Value, Given, str, bool, float)) and one != other and one == one:
        raise TraceProblem(f"a block returns {one} or {other}, by the number of samples", where=where, module="")
    return one


def joined_templates(one: Template, other: Template, where: str) -> Template:
    """Return the template for any number of samples; errors as of `joined`."""
    changed = [(Rebuilt(tuple, dict(enumerate(rebuilt for _, rebuilt in t.changed)))) for t in (one, other)]
    both = joined(changed[0], changed[1], where)
    paths = [path for path, _ in one.changed]
    return Template(
        returned=joined(one.returned, other.returned, where),
        changed=tuple(zip(paths, both.contents.values(), strict=True)),
    )


def _leaves(sign: Any) -> Iterator[Any]:
    if isinstance(sign, Rebuilt):
        for inner in sign.contents.values():
            yield from _leaves(inner)
    else:
        yield sign


def _side_by_side(sign: Any, part: Any) -> Iterator[tuple[Value, Tensor]]:
    if isinstance(sign, Value) and isinstance(part, Tensor):
        yield sign, part
    elif isinstance(sign, Rebuilt):
        found = contents_of(part) or {}
        for key, inner in sign.contents.items():
            yield from _side_by_side(inner, found.get(key))


def _container(kind: Any, contents: Mapping[Any, Any]) -> Any:
    if issubclass(kind, tuple):
        return kind(*contents.values()) if hasattr(kind, "_fields") else kind(tuple(contents.values()))
    if issubclass(kind, Mapping) and hasattr(kind, "__dataclass_fields__"):
        return kind(**contents)  # outputs of the transformers library
    if issubclass(kind, dict) or not issubclass(kind, (list, Mapping)):
        empty = kind() if kind is dict else kind.__new__(kind)
        _set_contents(empty, contents)
        return empty
    return kind(contents.values()) if issubclass(kind, list) else kind(contents)


def _set_contents(part: Any, contents: Mapping[Any, Any]) -> None:
    if isinstance(part, list):
        part[:] = contents.values()
    elif isinstance(part, dict) and hasattr(part, "__dataclass_fields__"):
        for name, value in contents.items():
            setattr(part, name, value)
    elif isinstance(part, dict):
        part.clear()
        part.update(contents)
    else:
        for name in [name for name in getattr(part, "__dict__", ()) if name not in contents]:
            object.__delattr__(part, name)
        for name, value in contents.items():
            object.__setattr__(part, name, value)
