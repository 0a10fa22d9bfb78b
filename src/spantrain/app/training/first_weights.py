"""What a new run's weights begin with: those in the folder of a transformers configuration, or new ones."""

from dataclasses import dataclass
from pathlib import Path

from spantrain.app.export.export import FoundWeights, find_weights
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError

_OTHER = frozenset({".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".pt", ".pth"})
"""Weights in files that are not read here: most run code when they are."""
_NO_WEIGHTS = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
"""What such files begin with that a trainer leaves beside weights."""
_SHOWN = 3
"""Names in the line for people."""


@dataclass(frozen=True, kw_only=True)
class FirstWeights:
    """Where weights come from."""

    text: str = ""
    """For people; empty: from where they always come, of a model by name or of a function."""
    found: FoundWeights | None = None
    """To be read; None: they are drawn, or a function of the user's makes them."""


def first_weights(spec: ModelSpec, *, from_scratch: bool) -> FirstWeights:
    """Say what a model's weights begin with; those of an `hf:` folder are looked at, and not read yet.

    Raises:
        ConfigError: the folder has weights that cannot be read, or are of another model, and it was not asked to leave
            them; it is not on this machine; or there are no weights that could be left.
    """
    folder = Path(spec.source)
    if spec.family != "hf":
        if from_scratch:
            raise ConfigError(f"--from-scratch: model {spec.name} reads no folder of weights; leave out the option")
        return FirstWeights()
    if from_scratch or not spec.source:
        return FirstWeights(text=f"Random weights, from scratch: none are read from {folder}")
    ways = "read them with `spantrain import` and go on with --resume, or begin with random ones: --from-scratch"
    if not folder.exists():
        raise ConfigError(
            f"model {spec.name}: {folder} is not on this machine, so it cannot be told whether it has weights; copy it "
            f"here, {ways}"
        )
    if folder.is_file():
        return FirstWeights(text=f"Random weights: {folder} is a configuration alone")
    if any(folder.glob("*.safetensors")):
        try:
            found = find_weights(folder, spec)
        except ConfigError as error:
            raise ConfigError(f"{error}; or begin with random weights: --from-scratch") from None
        return FirstWeights(text=f"Weights of {folder}: {found.parameters} parameters{_besides(found)}", found=found)
    other = [path.name for path in sorted(folder.iterdir()) if path.suffix in _OTHER]
    other = [name for name in other if not name.startswith(_NO_WEIGHTS)]
    if other:
        raise ConfigError(
            f"model {spec.name}: {folder} has weights in {other[0]}, and only *.safetensors are read; write them with "
            f"save_pretrained(..., safe_serialization=True), or {ways}"
        )
    return FirstWeights(text=f"Random weights: {folder} has a configuration and no weights")


def _besides(found: FoundWeights) -> str:
    converted = f"; {len(found.converted)} tensors of a shorter type are float32 now" if found.converted else ""
    more = ", ..." if len(found.ignored) > _SHOWN else ""
    unused = f"; not used: {', '.join(found.ignored[:_SHOWN])}{more}" if found.ignored else ""
    return f"{converted}{unused}"
