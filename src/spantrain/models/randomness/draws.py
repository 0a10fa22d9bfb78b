"""Draws of a forward pass as functions of seed, step, sample and place: dropout, attention's too, noise, dropped paths.

Functions of torch that draw are seen where they are called (`SeededDraws`), and inside of them the operations that do
(`operations`): torch's own attention and recurrent loops have several. No generator of torch's is asked.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.models.randomness.counter import at_least, normals, random_bits, row_words
from spantrain.models.randomness.operations import DrawnOperations
from spantrain.models.randomness.places import ORDERS, CallChain, DrawnShape, DrawnShapes, Sizes, guessed_shape

if TYPE_CHECKING:
    from spantrain.models.tensor_parallel.group import TensorGroup


PLAIN_DROPOUT = frozenset({"dropout", "dropout_"})
"""Names of functions that drop each number by itself."""
DROPOUT = PLAIN_DROPOUT | {
    "alpha_dropout", "alpha_dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
    "feature_alpha_dropout_", "feature_dropout", "feature_dropout_", "native_dropout",
}  # fmt: skip
"""Names of functions that drop, and give back what they are given in evaluation mode."""
ATTENTION = "scaled_dot_product_attention"
RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})
NOISE = frozenset(
    {"bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "log_normal_", "multinomial",
     "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_",
     "randperm", "rrelu", "rrelu_", "uniform_"}
)  # fmt: skip
"""Names of functions that draw whatever the mode."""
CHANCES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        ATTENTION: (4, "dropout_p"),
        "multi_head_attention_forward": (10, "dropout_p"),
        **dict.fromkeys(RECURRENT, (0, "")),
    }
)
"""Functions that need not draw: where their probability is among the arguments."""
_DRAWING = DROPOUT | RECURRENT | NOISE | {ATTENTION, "multi_head_attention_forward"}


class DrawnSamples(Record):
    """Whose random numbers are drawn: some samples of one step of a run."""

    seed: int
    """The run's."""
    step: int
    first: int
    """Number of the first of them within the step."""
    count: int


@dataclass(kw_only=True)
class DrawingModules:
    """What is known of a model, or a part of it, that draws; members of a group remember whose part is where."""

    names: Mapping[int, str]
    """Full names of its modules in the unsplit model, by identity."""
    shapes: DrawnShapes
    group: "TensorGroup | None" = None
    """The tensor-parallel one whose members have parts of it."""
    offsets: dict[tuple[str, Sizes], tuple[int, int]] = field(default_factory=dict)
    """By place and sizes of the own part: the dimension that is divided, and where the own part begins in it."""

    @classmethod
    def of(cls, model: nn.Module, shapes: DrawnShapes) -> "DrawingModules":
        """Return what is to be known of a whole model."""
        return cls(names={id(module): path for path, module in model.named_modules()}, shapes=shapes)


class SeededDraws(TorchFunctionMode):
    """Gives what is drawn while it is active; modules run in training mode or not, as they are set."""

    def __init__(self, modules: DrawingModules, samples: DrawnSamples) -> None:
        super().__init__()
        self.chain = CallChain(modules.names)
        self.noted: dict[str, tuple[str, Sizes]] = {}
        """What was drawn, by place: the function, and the shape."""
        self.unlike: list[str] = []
        """What was drawn by torch's own generator, which no sample's numbers can be told of."""
        self._modules = modules
        self._samples = samples
        self._words: dict[tuple[bool, torch.device], Tensor] = {}
        self._undo = contextlib.ExitStack()
        self._function = ""

    def resize(self, count: int) -> None:
        """Draw for so many samples from now on."""
        self._samples = replace(self._samples, count=count)
        self._words.clear()

    def __enter__(self) -> "SeededDraws":
        """Begin to watch modules, and to draw for them."""
        self._undo.enter_context(self.chain.watching())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """End."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._undo.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; if it draws, with numbers of the samples'."""
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _DRAWING:
            return func(*args, **given)
        self._function = name
        if name in PLAIN_DROPOUT and isinstance(args[0] if args else given.get("input"), Tensor):
            return self._dropped(name, args, given)
        # Torch's recurrent loops are given sizes besides, of packed sequences.
        is_packed = name in RECURRENT and len(args) > 3 and isinstance(args[3], (tuple, list))
        if is_packed and chance_of(name, args, given) > 0:
            self._refuse("drops between layers of packed sequences, whose rows are in order of time")
        if name in CHANCES and chance_of(name, args, given) == 0:
            return func(*args, **given)
        with contextlib.ExitStack() as undo:
            # Not by kernels that draw by themselves: settings of the whole process, and the processor has none.
            if name in RECURRENT and torch.cuda.is_available():
                undo.enter_context(torch.backends.cudnn.flags(enabled=False))
            elif name in CHANCES and torch.cuda.is_available():
                undo.enter_context(sdpa_kernel(SDPBackend.MATH))
            undo.enter_context(DrawnOperations(self))
            return func(*args, **given)

    def _dropped(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Tensor:
        """Return a tensor with some numbers zero and the others larger, as torch's function of these arguments does."""
        named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(given)
        whole, chance = named["input"], float(named.get("p", 0.5))
        if not 0.0 <= chance <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {chance}")
        if not named.get("train", named.get("training", True)) or chance == 0.0:
            return whole  # type: ignore[no-any-return]
        kept = self.drawn(whole.shape, whole.device, lambda bits: at_least(bits, chance), like=whole)
        scale = 1.0 / (1.0 - chance) if chance < 1.0 else 0.0
        dropped: Tensor = whole.mul_(kept) if named.get("inplace") or name.endswith("_") else whole * kept
        return dropped.mul_(scale)

    def drawn(
        self,
        shape: Sequence[int],
        device: torch.device,
        made: Callable[[Tensor], Tensor],
        *,
        like: Tensor | None = None,
        normal: bool = False,
    ) -> Tensor:
        """Return what a place draws now: `made` of random bits, or of numbers of the normal distribution, in a shape.

        Of a fake tensor only the shape is noted.
        """
        sizes, place = tuple(shape), self.chain.next_place()
        self.noted[place] = self._function, sizes
        if like is not None and is_fake(like):
            return made(like.new_zeros(sizes, dtype=torch.float32 if normal else torch.int32))
        known = self._modules.shapes.get(place) or guessed_shape(sizes, self._samples.count)
        known = DrawnShape(dim=None, sizes=sizes) if self._function in ORDERS else known
        try:
            own = known.of_sample(sizes, self._samples.count)
        except ValueError as error:
            self._refuse(str(error))
        key = known.dim is not None, device
        if key not in self._words:
            self._words[key] = row_words(
                self._samples.seed,
                self._samples.step,
                self._samples.first,
                self._samples.count if known.dim is not None else 0,
                device,
            )
        index = self._index(place, own, known.sizes, device)
        found = made((normals if normal else random_bits)(self._words[key], place, index))
        return found.view(sizes) if known.dim is None else found.view(-1, *own).movedim(0, known.dim).reshape(sizes)

    def _index(self, place: str, own: Sizes, whole: Sizes, device: torch.device) -> Tensor:
        """Number what is drawn of each sample; of a part of it, as in the whole."""
        numbers = torch.arange(torch.Size(own).numel(), dtype=torch.int32, device=device)
        if self._modules.group is None or own == whole or not whole:
            return numbers
        dim, start = self._offset(place, own, whole, device)
        every = torch.arange(torch.Size(whole).numel(), dtype=torch.int32, device=device)
        return every.view(whole).narrow(dim, start, own[dim]).flatten()

    def _offset(self, place: str, own: Sizes, whole: Sizes, device: torch.device) -> tuple[int, int]:
        """Return along which dimension members have parts of what a place draws, and where the own one begins."""
        found = self._modules.offsets.get((place, own))
        group = self._modules.group
        assert group is not None
        if found is None:
            differing = [dim for dim, (part, all_) in enumerate(zip(own, whole, strict=False)) if part != all_]
            if len(own) != len(whole) or len(differing) != 1:
                self._refuse(f"draws {own} for each sample where the whole model draws {whole}; plan without tensor-"
                             "parallel groups")  # fmt: skip
            length = torch.tensor([own[differing[0]]], dtype=torch.float32, device=device)
            lengths = group.all_gather(length, [1] * group.size, 0).tolist()
            found = differing[0], int(sum(lengths[: group.rank]))
            self._modules.offsets[place, own] = found
        return found

    def note_unlike(self, operation: str) -> None:
        """Note an operation that draws by torch's own generator, for want of another way."""
        self.unlike.append(f"{self._where}: `{self._function}` draws by {operation}")

    @property
    def _where(self) -> str:
        return self.chain.innermost.rpartition(">")[2] or "the model"

    def _refuse(self, why: str) -> None:
        raise ConfigError(
            f"{self._where}: `{self._function}` {why}; use torch.nn.functional.dropout, torch.bernoulli, torch.rand or "
            "torch.randn with the samples as the first dimension, or train with --dropout off"
        )


def without_dropout(func: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call a function of torch as in evaluation mode: without dropping; what draws otherwise does."""
    name = getattr(func, "__name__", "")
    if name in DROPOUT:
        return args[0] if args else given["input"]
    if name == ATTENTION:
        return func(*args[:4], 0.0, *args[5:], **given) if len(args) > 4 else func(*args, **{**given, "dropout_p": 0.0})
    return func(*args, **given)


def chance_of(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> float:
    """Return with which probability a function of `CHANCES` drops."""
    if name in RECURRENT:  # without a signature: flags, layers, dropout, training, ...
        numbers = [arg for arg in args if isinstance(arg, (bool, int, float))]
        return float(numbers[2]) if numbers[3] else 0.0
    place, own = CHANCES[name]
    trains = name == ATTENTION or (args[13] if len(args) > 13 else given.get("training", True))
    return float(args[place] if len(args) > place else given.get(own, 0.0)) if trains else 0.0


@contextlib.contextmanager
def seeded(
    model: nn.Module, *, seed: int, step: int, first_sample: int = 0, shapes: DrawnShapes | None = None
) -> Iterator[SeededDraws]:
    """Have a whole model in training mode draw what it draws when it is trained here, for the samples it is given.

    The first tensor that the model is called with has the samples as its first dimension.

    Args:
        model: as it was given; its mode stays as it is.
        seed: of the run.
        step: of the run, from 0.
        first_sample: number of the first sample within the step.
        shapes: where samples are in what is drawn; None: guessed, which goes wrong where other sizes are like theirs.

    >>> layer = nn.Dropout(0.5)
    >>> with seeded(layer, seed=0, step=3):
    ...     whole = layer(torch.ones(4, 8))
    >>> with seeded(layer, seed=0, step=3, first_sample=2):
    ...     bool((layer(torch.ones(2, 8)) == whole[2:]).all())
    True
    """
    modules = DrawingModules.of(model, shapes or {})
    samples = DrawnSamples(seed=seed, step=step, first=first_sample, count=1)
    draws = SeededDraws(modules, samples)

    def count(_model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        given = next(entry for entry in (*args, *kwargs.values()) if isinstance(entry, Tensor))
        draws.resize(given.shape[0])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        with draws:
            yield draws
    finally:
        hook.remove()


_TORCHS_NUMBERS = threading.RLock()


@contextlib.contextmanager
def global_seed(seed: int | None = None) -> Iterator[None]:
    """Have torch's own random numbers, NumPy's and Python's begin with a seed; behind it they are what they were.

    In one thread at a time: they belong to all, and two that ask for torch's state may wait for each other for ever, as
    torch holds its lock while Python tidies up and another thread goes on.
    """
    with _TORCHS_NUMBERS, torch.random.fork_rng(devices=[]):
        others = random.getstate(), np.random.get_state()
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


def torch_state(put: Tensor | None = None) -> Tensor:
    """Return the state of torch's own random numbers, once it is what is `put` there, if anything is."""
    with _TORCHS_NUMBERS:
        if put is not None:
            torch.set_rng_state(put)
        return torch.get_rng_state()
