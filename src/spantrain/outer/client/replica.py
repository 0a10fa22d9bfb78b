"""A cluster's side of the arithmetic: where its round began, what it pushed, and a new version under what it did since.

Di-PS, 2.1 and 3.2. Kept: after an update the cluster goes on from the new version. Decided here: a push is start minus
now (see `outer.policy.master`), and where the paper has the cluster wait it trains on, while its push waits for an
update and while a version comes; what it did meanwhile is put on top of the new version, and goes into its next push. A
push that came to nothing stays part of the next. So nothing is lost and nothing counted twice, however long an exchange
takes. Where pushes are rounded (see `round_push`), what the last push that was part of an update left over goes into
the next one; it is in no parameter meanwhile, and ends with the process.
"""

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spantrain.core.outer.layers import ParameterSpec
from spantrain.core.outer.stages import StageOrder
from spantrain.errors import ProtocolError
from spantrain.formats.registry import WireFormat
from spantrain.outer.client.parameters import LiveParameters, ModelParameters
from spantrain.outer.shard.numerics import Tensors, round_push


@dataclass(frozen=True, kw_only=True)
class TakenPush:
    """What a push brings, as it was when it was taken; it may be read while the cluster trains on."""

    start: Tensors
    now: Tensors
    left: Tensors = field(default_factory=dict)
    """Over from earlier pushes."""
    rest: dict[str, Tensor] = field(default_factory=dict)
    """Left over from this one, of what was sent rounded."""
    spare: dict[str, Tensor] = field(default_factory=dict)
    """Memory for that."""

    def tensors(
        self, specs: tuple[ParameterSpec, ...], wire_format: WireFormat = WireFormat.NATIVE, *, parameters: bool = False
    ) -> dict[str, Tensor]:
        """Return some parameters themselves, or their pseudo-gradient as it is sent; for one thread at a time."""
        return {one.name: self.now[one.name] if parameters else self._sent(one, wire_format) for one in specs}

    def _sent(self, spec: ParameterSpec, wire_format: WireFormat) -> Tensor:
        start, now, left = self.start[spec.name], self.now[spec.name], self.left.get(spec.name)
        if spec.sent_as(wire_format) != spec:
            room = self.spare.pop(spec.name, None)
            rest = torch.empty(spec.shape, dtype=torch.float32) if room is None else room
            sent = round_push(spec, wire_format, start, now, left, rest)
            self.rest[spec.name] = rest
            return sent
        gradient = start.detach() - now.detach()
        return gradient if left is None else gradient.add_(left)


class ClusterCopy:
    """The parameters that a cluster trains, and the two points in time that it must remember of them.

    Takes two copies beside the parameters, on the processor, and two more where pushes are rounded. Where several
    processes share the model, all of them call the same at once, and the first has the copies.

    >>> import torch
    >>> weight = torch.tensor([3.0])
    >>> copy = ClusterCopy({"weight": weight})
    >>> _ = weight.sub_(1.0)
    >>> taken = copy.take()
    >>> taken.start["weight"] - taken.now["weight"]
    tensor([1.])
    >>> _ = weight.sub_(0.5)
    >>> copy.pulled({"weight": torch.tensor([10.0])}, counted=True)
    >>> weight
    tensor([9.5000])
    """

    def __init__(self, parameters: Mapping[str, Tensor] | LiveParameters) -> None:
        """Begin a round; the parameters are the ones that are trained, and are changed in place."""
        self._live = ModelParameters(parameters) if isinstance(parameters, Mapping) else parameters
        self._spare: dict[str, Tensor] | None = None
        self._pushed: dict[str, Tensor] | None = None
        self._taken: TakenPush | None = None
        self._left: dict[str, Tensor] = {}
        self._spare_left: dict[str, Tensor] = {}
        self._start: Tensors = self._copied()

    def part(self, live: ModelParameters, names: Collection[str]) -> "ClusterCopy":
        """Return the copy of some of its parameters, where nothing was taken yet; `live`: these."""
        assert self._taken is None, "a copy is divided before the first push"
        part = copy(self)
        part._live, part._left, part._spare_left = live, {}, {}
        part._start = {name: one for name, one in self._start.items() if name in names}
        return part

    def _copied(self) -> dict[str, Tensor]:
        into, self._spare = self._spare or (self._live.memory() if self._live.leads else {}), None
        self._live.copy(into)
        return into

    def take(self) -> TakenPush:
        """Note what the parameters are, for a push; an earlier push that has not ended is part of it."""
        self._pushed = self._copied()
        spare, self._spare_left = self._spare_left, {}
        self._taken = TakenPush(start=self._start, now=self._pushed, left=self._left, spare=spare)
        return self._taken

    def skipped(self) -> None:
        """Note that the push came to nothing: the round goes on from the same start."""
        self._pushed = self._taken = None

    def pulled(self, version: Tensors, *, counted: bool, left_out: bool = False) -> None:
        """Begin a round from a version, which is kept: it must not change any more.

        `counted` says that the push was part of an update; if it was `left_out`, what rounding took from it is nothing
        to keep either. Processes but the first give no tensors.

        Raises:
            ProtocolError: it does not hold these parameters; nothing has changed.
        """
        if not self._live.leads:
            self._live.move({}, {})
            return
        mine, theirs = ({(name, one.shape) for name, one in held.items()} for held in (self._start, version))
        unlike = sorted({name for name, _ in mine ^ theirs})
        if unlike:
            raise ProtocolError(f"a pulled version differs from the model in {', '.join(unlike)}; nothing was changed")
        self._live.move(self._pushed if counted and self._pushed is not None else self._start, version)
        if counted:
            self._spare, self._pushed = self._pushed, None
            if self._taken is not None:
                # What the push that ends has left over takes the place of what was left over before it.
                self._spare_left, self._left = self._left, {} if left_out else self._taken.rest
                self._taken = None
        elif self._pushed is not None:
            self._pushed = {name: new + (self._pushed[name] - self._start[name]) for name, new in version.items()}
        self._start = version

    def follow(self, order: StageOrder, version: Tensors) -> TakenPush | None:
        """Do what all stages of a pipeline do behind the same step; return what was taken, if the order is to push.

        `version` is this stage's tensors of what the order's pull brought; devices but the stage's first have none.

        >>> import torch
        >>> from spantrain.core.outer.events import Ticket
        >>> weight = torch.tensor([3.0])
        >>> copy = ClusterCopy({"weight": weight})
        >>> copy.follow(StageOrder(pull=Ticket(1, 1), version=5), {"weight": torch.tensor([7.0])})
        >>> weight
        tensor([7.])
        """
        if order.skipped:
            self.skipped()
        if order.pull is not None:
            self.pulled(version, counted=order.counted, left_out=order.left_out)
        return self.take() if order.push else None
