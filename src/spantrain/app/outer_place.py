"""Where the outer optimizer's shards belong, by what outer.yaml says of places and clusters."""

from spantrain.config.outer import OuterConfig
from spantrain.errors import ConfigError
from spantrain.policy.outer.placement import Placement, PlacementRequest, place_shards

__all__ = ["place_outer"]

_REMEDY = "add it as docs/outer.md shows: model, clusters, and places with their bandwidths"


def place_outer(config: OuterConfig, *, source: str) -> Placement:
    """Return the best place of each shard; `source` is the file's name in errors.

    Raises:
        ConfigError: the file says nothing of places, or they have too little memory together.
    """
    places = config.places
    if places is None:
        raise ConfigError(f"{source}: has no placement section; {_REMEDY}")
    count = len(config.shards)
    size, more = divmod(places.model_bytes, count)
    request = PlacementRequest(
        bandwidth_bytes_per_s=places.bandwidth_bytes_per_s,
        throughput=places.throughput,
        shard_bytes={shard.name: max(1, size + (k < more)) for k, shard in enumerate(config.shards)},
        line_bytes_per_s=places.line_bytes_per_s,
        memory_bytes=places.memory_bytes,
    )
    try:
        return place_shards(request)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
