"""Where a model is cut whose units run its own forward: before its blocks, where all that later ones need can cross."""

from dataclasses import dataclass

from torch import nn

from spantrain.core.units import ModelSpec
from spantrain.models.randomness.shapes import DrawnShapes
from spantrain.models.tracing.cut import StepCutter, UnitPart
from spantrain.models.tracing.follow import Explored, Structure, explored, find_structure
from spantrain.models.tracing.source import Given, Loaded
from spantrain.models.tracing.stubs.calls import BlockCall, BlockWatch, Calls, Inside, Row, calls_for_any
from spantrain.models.tracing.tape import NamedWeight, Value
from spantrain.models.tracing.watch import watched
from spantrain.models.units import LABELS


@dataclass(frozen=True, kw_only=True, eq=False)
class StubPart(UnitPart):
    """What one unit runs for itself of a forward: the calls from `first` up to `end`."""

    first: int
    end: int
    modules: tuple[str, ...]
    """Paths of the modules that it calls, in order."""
    weights: tuple[str, ...]
    """Names of weights outside of those that it uses."""
    reads: tuple[int, ...]
    """What it reads of the samples; see `models.units.Rows`."""


class CallCutter(StepCutter[BlockCall, StubPart]):
    """Cuts a row of calls."""

    nothing_crosses = "no tensor crosses (behind {})"

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls.calls, calls.facts)
        self.calls = calls
        self._made_at = {
            sign.index: number
            for number, call in enumerate(calls.calls)
            for sign in call.template.leaves()
            if isinstance(sign, Value)
        }
        needs = [
            *((number, call.needs) for number, call in enumerate(calls.calls)),
            (len(calls.calls), calls.result_needs),
        ]
        uses = {source: number for number, sources in needs for source in sources}
        self._last_use = {source.index: number for source, number in uses.items() if isinstance(source, Value)}
        self._inside = [(source.call, number) for source, number in uses.items() if isinstance(source, Inside)]
        """Numbers of calls, and of the last ones that need what those did and cannot be given again."""

    def _where(self, step: BlockCall) -> str:
        return step.path

    def _is_inside(self, step: BlockCall, path: str) -> bool:
        return step.path.startswith(f"{path}.")

    def _part(self, lo: int, hi: int) -> StubPart:
        calls, last = self._steps[lo:hi], hi == len(self._steps)
        needs = {*self.calls.looked_at, *(source for call in calls for source in call.needs)}
        needs |= self.calls.result_needs if last else set()
        reads = {source.number for source in needs if isinstance(source, Row)} | ({LABELS} if last else set())
        if lo == 0 and not reads:
            reads = {0}  # which tells how many samples there are
        return StubPart(
            first=lo,
            end=hi,
            modules=tuple(dict.fromkeys(call.path for call in calls)),
            weights=tuple(sorted(source.name for source in needs if isinstance(source, NamedWeight))),
            takes=self._crossing(lo) if lo else (),
            gives=() if last else self._crossing(hi),
            reads=tuple(sorted(reads)),
        )

    def _why_not(self, place: int) -> str | None:
        if any(call < place <= used for call, used in self._inside):
            where = self._where(self._steps[place - 1])
            return f"a tensor goes on that is neither given nor returned (behind {where})"
        return super()._why_not(place)


def follow_calls(spec: ModelSpec) -> Explored[CallCutter]:
    """Load a model and find what its forward calls: without numbers if that can be, else for real on its example batch.

    Raises:
        ConfigError: the model cannot be built, fails on its example batch, or decides by numbers of the data.
    """

    def calls_of(loaded: Loaded, structure: Structure, given: Given) -> tuple[CallCutter, DrawnShapes]:
        small, large, draws = watched(BlockWatch, spec, loaded, structure.opened, given)
        return CallCutter(calls_for_any(small, large)), draws

    return explored(spec, _structure_of, calls_of)


def _structure_of(model: nn.Module) -> Structure:
    """Return a model's structure, whose blocks are the modules that its class says not to split, if it says so."""
    found, names = find_structure(model), set(getattr(model, "_no_split_modules", None) or ())
    whole = [path for path, module in model.named_modules() if path and type(module).__name__ in names]
    whole = [path for path in whole if not any(path.startswith(f"{other}.") for other in whole)]
    if len(whole) < 2:
        return found
    inside = tuple(f"{path}." for path in whole)
    above = {path[:end] for path in whole for end in [0, *(n for n, char in enumerate(path) if char == ".")]}
    opened = frozenset(path for path in found.opened if path not in whole and not path.startswith(inside)) | above
    elements = frozenset(path for path in found.elements if not path.startswith(inside)) - above
    return Structure(opened=opened, nested=found.nested & opened - above, elements=elements | set(whole))
