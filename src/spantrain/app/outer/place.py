"""Where the outer optimizer's shards belong, by what outer.yaml says of places and clusters."""

from spantrain.config.outer.outer_file import OuterConfig
from spantrain.core.outer.layers import ParameterSpec
from spantrain.errors import ConfigError
from spantrain.formats.registry import WireFormat
from spantrain.outer.policy.placement import PlacementRequest, ShardPlacement, place_shards

_REMEDY = "add it as docs/outer.md shows: model, clusters, and places with their bandwidths"


def place_outer(config: OuterConfig) -> ShardPlacement:
    """Return the best place of each shard.

    Raises:
        ConfigError: the file says nothing of places, or they have too little memory together.
    """
    places = config.places
    if places is None:
        raise ConfigError(f"{config.source}: has no placement section; {_REMEDY}")
    count, settings = len(config.shards), config.numbers.settings
    held = len(places.throughput) if settings.compensation else 0
    size, more = divmod(places.model_bytes, count)
    request = PlacementRequest(
        bandwidth_bytes_per_s=places.bandwidth_bytes_per_s,
        throughput=places.throughput,
        shard_bytes={shard.name: max(1, size + (k < more)) for k, shard in enumerate(config.shards)},
        line_bytes_per_s=places.line_bytes_per_s,
        memory_bytes=places.memory_bytes,
        bytes_held_per_byte=PlacementRequest.bytes_held_per_byte + held,
        bytes_pushed_per_byte=_pushed(places.model_bytes, settings.push_format),
    )
    try:
        return place_shards(request)
    except ValueError as error:
        raise ConfigError(f"{config.source}: {error}") from None


def _pushed(model_bytes: int, push_format: WireFormat | None) -> float:
    """Return what goes up for each byte of a model of float32 that comes down."""
    model = ParameterSpec(name="model", shape=(max(1, model_bytes // 4),))
    return model.sent_as(push_format or WireFormat.NATIVE).size_bytes / model.size_bytes
