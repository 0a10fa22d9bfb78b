"""Statistics that normalizations take of batches: running ones as state, and those of the samples of a step.

In training a normalization takes the statistics of the samples that one device runs at once (a micro-batch), as plain
PyTorch does where gradients are accumulated; or of all that the replicas of a stage run of one micro-batch, which then
wait for each other inside of F and of the backward pass (`schedule.joint` says where that ends). Running statistics are
brought up to date at the end of the step, by all micro-batches of the stage in the order of samples, so that they
depend neither on the order of work, nor on which replica had which samples, nor on what is run again.

By the statistics of what several devices have is normalized as by `torch.nn.SyncBatchNorm`, on processors too, with
tensor-parallel members that have some of the channels, or all. Only the normalization exchanges anything, not its scale
and shift: so the weights' half of a backward pass waits for nobody (`models.tensor_parallel.group`).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.errors import ConfigError
from spantrain.models.units import UnitModule, full_name

if TYPE_CHECKING:
    from spantrain.models.tensor_parallel.group import TensorGroup

_CHANNELS = "_own_channels"
_FROZEN = "_statistics_stay"
_NAME = "_name_in_model"


def named_statistics(units: Iterable[UnitModule]) -> dict[str, Tensor]:
    """Return the running statistics by their names in the unsplit model; those of a module in two units once."""
    found = {id(tensor): (name, tensor) for name, _, tensor in reversed(list(_all(units)))}
    return dict(reversed(found.values()))


def _all(units: Iterable[UnitModule]) -> Iterator[tuple[str, _NormBase, Tensor]]:
    for unit in units:
        for path, module in norms_of(unit):
            for name, tensor in module.named_buffers(recurse=False):
                yield f"{_name_of(unit, path, module)}.{name}", module, tensor


def statistics_parts(units: Iterable[UnitModule]) -> dict[str, TensorPart]:
    """Return by name which part of each running statistic units hold that were divided (`keep_channels`)."""
    return {
        name: (_own_channels(module) if tensor.dim() else None) or TensorPart(full_shape=tuple(tensor.shape))
        for name, module, tensor in _all(units)
    }


def keep_channels(module: _NormBase, part: TensorPart, held: int) -> None:
    """Note that a normalization's statistics are a part of the unsplit model's, of so many channels."""
    setattr(module, _CHANNELS, part)
    module.num_features = held


def _own_channels(module: _NormBase) -> TensorPart | None:
    found = getattr(module, _CHANNELS, None)
    return found if isinstance(found, TensorPart) else None


def norms_of(unit: nn.Module) -> Iterator[tuple[str, _NormBase]]:
    """Yield the normalizations that keep running statistics, with their paths."""
    for path, module in unit.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None:
            yield path, module


def trained_norms(units: Iterable[nn.Module]) -> tuple[_NormBase, ...]:
    """Return those that take statistics of batches in training, each once."""
    found = (module for unit in units for _, module in norms_of(unit) if not getattr(module, _FROZEN, False))
    return tuple({id(module): module for module in found}.values())


def trained_names_of(unit: UnitModule) -> tuple[str, ...]:
    """Return the full names of those of a unit."""
    known = {id(module) for module in trained_norms([unit])}
    return tuple(_name_of(unit, path, module) for path, module in norms_of(unit) if id(module) in known)


def _name_of(unit: UnitModule, path: str, module: _NormBase) -> str:
    return getattr(module, _NAME, "") or full_name(unit, path)


def leave_frozen(model: nn.Module, trains: Collection[str]) -> None:
    """Have normalizations keep their running statistics whose paths are not among those that train.

    Each is known by its first path from now on, wherever it is used.
    """
    for path, module in norms_of(model):
        setattr(module, _FROZEN, path not in trains)
        setattr(module, _NAME, path)


def read_gradients_in_order(model: nn.Module) -> None:
    """Have normalizations of a model, in place, take gradients of one sample as they are.

    On a processor, torch 2.13 takes those whose channels lie beside each other, as behind `view(...).permute(0, 2, 1)`,
    for others where the stride of the one sample is not its size: it computes wrong ones, without a word.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and _in_order not in module._forward_hooks.values():
            module.register_forward_hook(_in_order)


def _in_order(_module: nn.Module, _given: object, result: Tensor) -> None:
    if result.requires_grad and result.shape[0] == 1:
        result.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]


class OneBatchNorm(_BatchNorm):
    """What a `SyncBatchNorm` is taken as: a normalization by the statistics of the samples here, of any shape."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - the signature is torch's
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input, got {input.dim()}D")


def without_exchange(model: nn.Module) -> int:
    """Make of each `SyncBatchNorm` one that exchanges nothing, in place; return how many there were."""
    found = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in found:
        module.__class__ = OneBatchNorm  # type: ignore[assignment]
    return len(found)


class Channels(Record):
    """The channels that a device has of a normalization."""

    count: int
    """Of all, in the unsplit model."""
    part: TensorPart | None
    """None: all of them."""
    index: Tensor
    """Of the own ones."""


class JoinedDevices(Record):
    """All devices of a stage, whose replicas run the same micro-batch, and do the same in the same order."""

    group: "TensorGroup"
    leads: bool
    """Whether this device tells of what the members of its replica hold whole."""

    def totals(self, sums: tuple[Tensor, Tensor], count: float, channels: Channels) -> tuple[Tensor, Tensor, float]:
        """Return two sums by own channel, and the number that they are of, over all devices; float64."""
        found = torch.zeros(2 * channels.count + 1, dtype=torch.float64, device=sums[0].device)
        if self.leads or channels.part is not None:
            for whole, own in zip(found[:-1].chunk(2), sums, strict=True):
                whole[channels.index] = own.to(torch.float64)
        found[-1] = count * self.leads
        self.group.all_reduce(found)
        first, second = found[:-1].chunk(2)
        return first[channels.index], second[channels.index], float(found[-1])


class _Normalized(torch.autograd.Function):
    """Rows of mean 0 and variance 1 in each channel, over all devices."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, eps: float, joined: JoinedDevices, channels: Channels) -> tuple[Tensor, ...]:
        dims = [dim for dim in range(given.dim()) if dim != 1]
        rows, own = given.float(), given.numel() // given.shape[1]
        variance, mean = (tensor.double() for tensor in torch.var_mean(rows, dim=dims, correction=0))
        first, second, count = joined.totals((mean * own, (variance + mean.square()) * own), own, channels)
        if count <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {given.shape}")
        mean = first / count
        variance = (second / count - mean.square()).clamp_(min=0)
        scale = torch.rsqrt(variance + eps).float()
        result = (rows - _by_channel(mean.float(), rows)) * _by_channel(scale, rows)
        ctx.save_for_backward(result, scale)
        ctx.count, ctx.joined, ctx.channels, ctx.dtype = count, joined, channels, given.dtype
        mean, unbiased = mean.float(), (variance * (count / (count - 1))).float()
        ctx.mark_non_differentiable(mean, unbiased)
        return result, mean, unbiased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, scale = ctx.saved_tensors
        gradient = gradients[0]
        dims = [dim for dim in range(result.dim()) if dim != 1]
        own = gradient.sum(dims), (gradient * result).sum(dims)
        found = ctx.joined.totals(own, 0.0, ctx.channels)
        mean, along = (_by_channel((total / ctx.count).float(), result) for total in found[:2])
        return ((gradient - mean - result * along) * _by_channel(scale, result)).to(ctx.dtype), None, None, None


def jointly_normalized(
    norm: _BatchNorm, given: Tensor, joined: JoinedDevices, channels: Channels
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a normalization makes of its input, with the mean and the unbiased variance of all devices' samples.

    Args:
        norm: whose scale and shift are applied; its running statistics stay.
        given: `(samples, channels, ...)`.
        joined: who has the other samples.
        channels: of the normalization here.

    Raises:
        ValueError: there is one number in each channel.
        PeerLostError: another device went away.
    """
    norm._check_input_dim(given)  # type: ignore[no-untyped-call]
    result, mean, variance = _Normalized.apply(given, norm.eps, joined, channels)  # type: ignore[no-untyped-call]
    if norm.affine:
        result = result * _by_channel(norm.weight, result) + _by_channel(norm.bias, result)
    return result.to(given.dtype), mean, variance


def _by_channel(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.view(1, -1, *[1] * (like.dim() - 2))


class _Taken(Record):
    """What one call of a normalization took of its samples."""

    norm: int
    mean: Tensor
    """Of all replicas, where they exchange it."""
    variance: Tensor
    """Without bias."""


class BatchStatistics:
    """Has the normalizations of a stage take statistics of the samples that run at once, and keeps them for the end of
    the step. Outside of its `with` blocks they go by their running ones.
    """

    def __init__(self, units: Sequence[UnitModule], joined: JoinedDevices | None = None) -> None:
        """Watch over these units; of none: nothing is done. `joined`: the stage's devices, whose samples count too."""
        self._joined = joined
        self._norms = trained_norms(units)
        self._names = tuple(dict.fromkeys(name for unit in units for name in trained_names_of(unit)))
        self._taken: dict[Span, list[_Taken]] = {}

    def __bool__(self) -> bool:
        """Whether any normalization takes statistics of batches."""
        return bool(self._norms)

    def clear(self) -> None:
        """Forget what the present step took."""
        self._taken.clear()

    @contextmanager
    def of(self, span: Span, *, again: bool = False) -> Iterator[None]:
        """Take the statistics of a span's samples, whose F runs in the block; if it runs `again`, they count once."""
        taken: list[_Taken] = []
        if not again:
            self._taken[span] = taken
        with ExitStack() as undo:
            for number, module in enumerate(self._norms):
                joined = self._joined if isinstance(module, _BatchNorm) else None
                undo.enter_context(_noted_calls(module, number, taken, joined))
            try:
                yield
            except ValueError as error:
                if "more than 1" not in str(error):
                    raise
                raise ConfigError(
                    f"samples {span}: a normalization ({', '.join(self._names[:2])}) has one number in each channel, "
                    f"of which there are no statistics ({error}); plan larger micro-batches, by a "
                    "larger --global-batch, say, or give --batch-norm frozen"
                ) from error

    @torch.no_grad()
    def commit(self, spans: Sequence[Span], total: Callable[[Tensor], object], *, leads: bool) -> None:
        """Bring running statistics up to date by all micro-batches of the stage, whoever ran them; all devices do so.

        Args:
            spans: all of them, by rising sample; each is that of a replica, or of several together.
            total: replaces a tensor by its sum over all devices of the stage.
            leads: whether this device tells of what the members of its replica hold whole.
        """
        if not self._norms:
            return
        begins = [span.lo for span in spans]
        places = [_place_of(module) for module in self._norms]
        sizes = [2 * place.channels.count + 1 for place in places]
        sums = torch.zeros(sum(sizes), dtype=torch.float64, device=places[0].running[0].device)
        of_norm = sums.split_with_sizes(sizes)
        for span, taken in self._taken.items():
            calls = Counter(one.norm for one in taken)
            before: Counter[int] = Counter()
            index = bisect_right(begins, span.lo) - 1
            part = span.size / spans[index].size
            for one in taken:
                place, number = places[one.norm], index * calls[one.norm] + before[one.norm]
                before[one.norm] += 1
                if leads or place.channels.part is not None:
                    place.add(of_norm[one.norm], one, part * place.weight(number, len(spans) * calls[one.norm]))
                of_norm[one.norm][-1] += part * leads
        total(sums)
        for place, own in zip(places, of_norm, strict=True):
            place.put(own)
        self.clear()


@contextmanager
def _noted_calls(module: Any, number: int, taken: list[_Taken], joined: JoinedDevices | None) -> Iterator[None]:
    """Have a normalization take the statistics of its samples, or of all that is joined, where it runs; note them."""
    channels, own, plain = _channels_of(module), module.__dict__.get("forward"), module.forward

    def alone(given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Swap what it keeps while it runs, so that it leaves there the statistics of its samples alone."""
        kept, momentum = dict(module._buffers), module.momentum
        module._buffers.update({name: torch.zeros_like(tensor) for name, tensor in kept.items()})
        module.momentum, module.training = 1.0, True
        try:
            return plain(given), module.running_mean, module.running_var
        finally:
            module._buffers.update(kept)
            module.momentum, module.training = momentum, False

    def forward(given: Tensor) -> Tensor:
        result, mean, variance = jointly_normalized(module, given, joined, channels) if joined else alone(given)
        taken.append(_Taken(norm=number, mean=mean, variance=variance))
        return result

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


class _Place(Record):
    """A normalization's running statistics, and where the own channels are among all."""

    running: tuple[Tensor, Tensor]
    tracked: Tensor | None
    """Number of batches; None: not counted."""
    momentum: float | None
    """None: all batches count alike."""
    channels: Channels

    def weight(self, number: int, batches: int) -> float:
        """Return what one of so many batches counts, by its number; the rest is what was there."""
        if self.momentum is None:
            return 1.0 / (batches + (0 if self.tracked is None else int(self.tracked)))
        return self.momentum * (1.0 - self.momentum) ** (batches - 1 - number)

    def add(self, sums: Tensor, taken: _Taken, weight: float) -> None:
        """Count what a batch gave."""
        for whole, own in zip(sums[:-1].chunk(2), (taken.mean, taken.variance), strict=True):
            whole.index_add_(0, self.channels.index, own.to(torch.float64), alpha=weight)

    def put(self, sums: Tensor) -> None:
        """Take over what all batches gave, with their number behind it."""
        batches = round(float(sums[-1]))
        rest = 1.0 - sum(self.weight(number, batches) for number in range(batches))
        for whole, running in zip(sums[:-1].chunk(2), self.running, strict=True):
            running.copy_(running.to(torch.float64) * rest + whole[self.channels.index])
        if self.tracked is not None:
            self.tracked.add_(batches)


def _place_of(module: _NormBase) -> _Place:
    mean, variance = module.running_mean, module.running_var
    assert mean is not None
    assert variance is not None
    counts = not isinstance(module, _InstanceNorm)  # whose number stays, and which has no mean over all batches
    return _Place(
        running=(mean, variance),
        tracked=module.num_batches_tracked if counts else None,
        momentum=module.momentum if counts else module.momentum or 0.0,
        channels=_channels_of(module),
    )


def _channels_of(module: _NormBase) -> Channels:
    assert module.running_mean is not None
    held, part = module.running_mean.numel(), _own_channels(module)
    ranges = [torch.arange(span.lo, span.hi) for span in part.ranges] if part is not None else []
    index = torch.cat(ranges) if ranges else torch.arange(held)
    count = part.full_shape[0] if part is not None else held
    return Channels(count=count, part=part, index=index.to(module.running_mean.device))
