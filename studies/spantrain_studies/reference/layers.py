"""What the layers of a profiled model cost inside a running step: seconds and bytes, those left out of it estimated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from spantrain.errors import ProfileError
from spantrain_studies.reference.platform import Platform, running_s
from spantrain_studies.reference.types import (
    FLOAT_BYTES,
    LayerTimes,
    ModelShape,
    Reference,
    ReferenceModel,
    ReferenceReplica,
)

_LOGITS_KEPT = 2
"""Tensors of the logits' size that a head keeps: the logits, and the softmax for the backward of the loss."""

_HEAD = "output_head"
_BLOCK = "transformer_block"

_Get = Callable[[LayerTimes], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class _Projection:
    """The projection to the vocabulary, on one device of a tensor-parallel group."""

    parameters: float
    logits_floats: float
    """For one sample."""
    forward_flop: float
    """For one sample."""


class LayerCosts:
    """Seconds and bytes of consecutive layers of a model, on one device of a replica."""

    def __init__(self, reference: Reference, model: str, platform: Platform) -> None:
        self._reference = reference
        self._model = reference.models[model]
        self._platform = platform
        self._layer_s = cache(self._layer_seconds)

    def forward_s(self, layers: range, replica: ReferenceReplica, samples: int) -> float:
        """Return the seconds of the forward of a micro-batch.

        Raises:
            ProfileError: the layers were not timed on this kind at this degree.
        """
        return sum(self._layer_s(layer, replica.kind, replica.tp_degree, samples, _forward) for layer in layers)

    def backward_s(self, layers: range, replica: ReferenceReplica, samples: int) -> float:
        """Return the seconds of the full backward of a micro-batch; the embedding's own was timed as nothing."""
        return sum(self._layer_s(layer, replica.kind, replica.tp_degree, samples, _backward) for layer in layers)

    def launch_s(self, kind: str) -> float:
        """Return what the host takes to launch a layer's forward: the least that a block of any size was timed at.

        Raises:
            ProfileError: the model was not timed on this kind.
        """
        block = self._model.roles.index(_BLOCK)
        found = [times.forward_s[block] for (timed, _, _), times in self._model.times.items() if timed == kind]
        if not found:
            raise ProfileError(f"{self._model.name} was not timed on {kind}")
        return min(found)

    def update_s(self, layers: range, replica: ReferenceReplica, samples: int) -> float:
        """Return the seconds of the optimizer's update.

        The profile gives every layer the same figure. Over the degrees it follows the parameters of one layer of each
        role (bytes over the device's memory bandwidth): it is the update of the small model that was profiled, so the
        stage's is that times its parameters over the small model's.
        """
        points = self._points(layers.start, replica.kind, replica.tp_degree, lambda times: times.update_s)
        size = min(points, key=lambda timed: abs(timed - samples))
        profiled = self._parameters_profiled(replica.tp_degree)
        return points[size] * self.parameters(layers, replica.tp_degree) / profiled if profiled else 0.0

    def parameters(self, layers: range, tp_degree: int) -> float:
        """Return the parameters on one device."""
        found = sum(self._model.sizes_by_tp[tp_degree].parameters[layer] for layer in layers)
        missing = self._missing_head(tp_degree)
        return found + (missing.parameters if missing and self._last in layers else 0.0)

    def activation_bytes(self, layer: int, tp_degree: int) -> float:
        """Return what a layer keeps for the backward of one sample, on one device."""
        floats = self._model.sizes_by_tp[tp_degree].activation_floats[layer]
        missing = self._missing_head(tp_degree) if layer == self._last else None
        return FLOAT_BYTES * (floats + (_LOGITS_KEPT * missing.logits_floats if missing else 0.0))

    def cut_bytes(self, layer: int, tp_degree: int) -> float:
        """Return the bytes that cross the cut behind a layer for one sample, of the whole group together."""
        return FLOAT_BYTES * self._model.sizes_by_tp[tp_degree].output_floats[layer]

    @property
    def head_is_estimated(self) -> bool:
        """Whether the profile lacks the projection to the vocabulary, so that it is estimated."""
        return self._missing_head(min(self._model.sizes_by_tp)) is not None

    @property
    def _last(self) -> int:
        return self._model.num_layers - 1

    def _layer_seconds(self, layer: int, kind: str, tp_degree: int, samples: int, get: _Get) -> float:
        exposure = self._platform.launch_exposure
        seconds = running_s(self._points(layer, kind, tp_degree, get), samples, exposure)
        missing = self._missing_head(tp_degree) if layer == self._last else None
        if missing is None:
            return seconds
        points, flop = self._like_the_head(kind, tp_degree, get)
        return seconds + running_s(points, samples, exposure) * missing.forward_flop / flop

    def _points(self, layer: int, kind: str, tp_degree: int, get: _Get) -> Mapping[int, float]:
        found = _points_of(self._model, layer, kind, tp_degree, get)
        if not found:
            raise ProfileError(f"{self._model.name} was not timed on {kind} at tensor-parallel degree {tp_degree}")
        return found

    def _parameters_profiled(self, tp_degree: int) -> float:
        by_role = dict(zip(self._model.roles, self._model.sizes_by_tp[tp_degree].parameters, strict=True))
        return sum(by_role.values())

    def _missing_head(self, tp_degree: int) -> _Projection | None:
        """Return the projection if the model ends with a head whose profile does not hold it."""
        shape, sizes = self._model.shape, self._model.sizes_by_tp[tp_degree]
        if shape is None or not self._model.roles[-1].startswith(_HEAD):
            return None
        projection = _projection(shape, sizes.parameters[0])
        return projection if sizes.parameters[-1] < projection.parameters / 2 else None

    def _like_the_head(self, kind: str, tp_degree: int, get: _Get) -> tuple[Mapping[int, float], float]:
        """Return the times of something that works like the head, and its operations for one sample.

        The measured head of another model on the same kind and degree; else this model's own block.
        """
        for model in self._reference.models.values():
            shape, sizes = model.shape, model.sizes_by_tp.get(tp_degree)
            if shape is None or sizes is None or not model.roles[-1].startswith(_HEAD):
                continue
            projection = _projection(shape, sizes.parameters[0])
            points = _points_of(model, model.num_layers - 1, kind, tp_degree, get)
            if points and sizes.parameters[-1] >= projection.parameters / 2:
                return points, projection.forward_flop
        assert self._model.shape is not None, "a head is estimated for models with a known shape only"
        block = self._model.roles.index(_BLOCK)
        return self._points(block, kind, tp_degree, get), _block_flop(self._model.shape, tp_degree)


def _projection(shape: ModelShape, embedding_parameters: float) -> _Projection:
    """Return the projection that goes with an embedding: as many rows of the vocabulary, the same hidden size.

    The embedding holds a row for each word (its part of them, under tensor parallelism) and one for each position.
    """
    words = embedding_parameters / shape.hidden - shape.positions
    return _Projection(
        parameters=words * shape.hidden,
        logits_floats=words * shape.sequence_length,
        forward_flop=2.0 * shape.sequence_length * shape.hidden * words,
    )


def _block_flop(shape: ModelShape, tp_degree: int) -> float:
    """Return a block's forward operations for one sample: 12 h² weights, and two products with the scores."""
    per_token = 2.0 * 12 * shape.hidden**2 + 4.0 * shape.sequence_length * shape.hidden
    return shape.sequence_length * per_token / tp_degree


def _points_of(model: ReferenceModel, layer: int, kind: str, tp_degree: int, get: _Get) -> dict[int, float]:
    return {
        samples: get(times)[layer] for (k, samples, tp), times in model.times.items() if k == kind and tp == tp_degree
    }


def _forward(times: LayerTimes) -> tuple[float, ...]:
    return times.forward_s


def _backward(times: LayerTimes) -> tuple[float, ...]:
    return times.backward_s
