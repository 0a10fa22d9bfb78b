"""What outer.yaml says, as the master and the shards take it; what it leaves out is as they do by themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from spantrain.config.outer.outer_file import OuterConfig
from spantrain.errors import ConfigError, UsageError
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.guard import GuardSettings
from spantrain.outer.policy.rule import OuterRule
from spantrain.outer.policy.settings import OuterSettings


@contextmanager
def naming_state(config: OuterConfig) -> Iterator[None]:
    """Say of what is wrong with the master's folder which field of which file names it.

    Raises:
        ConfigError: the folder, or something in it, cannot be used.
    """
    try:
        yield
    except UsageError as error:
        raise ConfigError(f"{config.source}: master.state: {error}") from None


def master_config(config: OuterConfig) -> MasterConfig:
    """Return what the master is told."""
    data = config.data
    return MasterConfig(
        shards=tuple(shard.name for shard in config.shards),
        settings=_settings(config),
        rule=replace(OuterRule(), **_given(asdict(config.numbers.rule))),
        samples=data.samples if data else 0,
        chunks=data.chunks if data else 0,
        passes=data.passes if data else None,
        encrypted=config.encrypted,
    )


def _settings(config: OuterConfig) -> OuterSettings:
    given = asdict(config.numbers.settings)
    clipped = given.pop("clipped")
    guard = replace(GuardSettings(), **_given(asdict(config.numbers.guard)))
    settings = replace(OuterSettings(guard=guard), **_given(given))
    return settings if clipped else replace(settings, clip_norm=None)


def _given(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if value is not None}
