"""What a person sees of the outer optimizer: its master's status, and where shards belong."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spantrain.cli.options import print_json
from spantrain.cli.render.text import console_for_people, say
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds
from spantrain.errors import PeerLostError

if TYPE_CHECKING:
    from spantrain.app.outer.up import OuterUp
    from spantrain.outer.link.status import MasterStatus
    from spantrain.outer.policy.placement import ShardPlacement

_PLAIN_WIDTH = 120
_WATCH_EVERY_S = 1.0
_FEW_TRANSFERS = 8


def say_up(found: "OuterUp", config_path: Path, *, as_json: bool) -> None:
    """Print how to join what is up."""
    if as_json:
        print_json({name: str(value) for name, value in vars(found).items()})
        sys.stdout.flush()
        return
    sys.stdout.write(
        f"master: {found.address}\n"
        f"token: {found.token} (also in {found.token_file})\n"
        f"logs: {found.logs}\n"
        "in each cluster, with the token in SPANTRAIN_OUTER_TOKEN where that file is not at hand:\n"
        f"  spantrain outer run {config_path} --cluster NAME -- COMMAND...\n"
        f"  spantrain outer status {config_path}\n"
    )
    sys.stdout.flush()


def say_master(address: str, token_file: Path) -> None:
    """Print how to join a master; its token is not printed, since logs are read by many."""
    sys.stdout.write(f"master: {address}\ntoken: in {token_file}\n")
    sys.stdout.flush()


def show_status(status: "MasterStatus") -> None:
    """Print it."""
    console_for_people(_PLAIN_WIDTH).print(_status(status))


def watch_status(ask: Callable[[], "MasterStatus"], *, as_json: bool) -> None:
    """Show it once a second until interrupted, in place or as lines of JSON; a master that is away is waited for."""
    if as_json:
        while True:
            sys.stdout.write(json.dumps(ask().to_plain()) + "\n")
            sys.stdout.flush()
            time.sleep(_WATCH_EVERY_S)
    with Live(_status(ask()), console=console_for_people(_PLAIN_WIDTH), auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_EVERY_S)
            try:
                live.update(_status(ask()), refresh=True)
            except PeerLostError as error:
                live.update(Text(str(error)), refresh=True)


def _status(status: "MasterStatus") -> RenderableType:
    parts: list[RenderableType] = [Text(_summary(status))]
    if status.late_s is not None:
        parts.append(Text(f"no new version for {format_seconds(status.late_s)}: waits for {status.waits_for}"))
    parts += [_clusters(status), _shards(status)]
    if status.links:
        parts.append(_links(status))
    lines = [
        f"{one.cluster} {one.way}es layer {one.layer}, {format_bytes(one.size_bytes)}, at {one.shard} since "
        f"{format_seconds(one.since_s)}"
        for one in status.transfers[:_FEW_TRANSFERS]
    ]
    if len(status.transfers) > _FEW_TRANSFERS:
        lines.append(f"and {len(status.transfers) - _FEW_TRANSFERS} more layers on their way")
    for number, update in enumerate([one.last_update for one in status.fragments] or [status.last_update]):
        if update is not None:
            of = f" of fragment {number}" if status.fragments else ""
            lines.append(f"last update{of}: norm {update.norm:.4g}, scaled by {update.scale:.3g}")
            lines += [f"  {cluster}: {verdict}" for cluster, verdict in update.verdicts.items()]
    lines += [f"refused {count} times: {reason}" for reason, count in status.refusals.items()]
    return Group(*parts, *(Text(line) for line in lines))


def _summary(status: "MasterStatus") -> str:
    versions = ", ".join(str(one.version) for one in status.fragments) or str(status.version)
    text = (
        f"{status.address}: version{'s' if status.fragments else ''} {versions}, {status.updates} updates, "
        f"{status.left_out} pushes left out, {status.layers} layers of {format_bytes(status.size_bytes)}"
    )
    if status.chunks is not None:
        text += f"; data: {status.chunks.counted_samples:,} of {status.chunks.samples:,} samples counted"
    return text


def _clusters(status: "MasterStatus") -> Table:
    table = Table("cluster", "state", "version", "got", "staleness", "pushes", "left out", "tokens", "chunks", "heard")
    for one in status.clusters:
        table.add_row(
            one.name,
            one.state,
            str(one.version),
            "" if one.got_version is None else f"{one.got_version}, {_ago(one.got_ago_s)}",
            f"{one.mean_staleness:.1f}",
            str(one.pushes),
            str(one.left_out),
            f"{one.tokens:,}",
            str(one.leases),
            _ago(one.heard_ago_s),
        )
    return table


def _shards(status: "MasterStatus") -> Table:
    table = Table("shard", "state", "listens on", "layers", "holds", "versions", "heard")
    for one in status.shards:
        table.add_row(
            one.name,
            one.state,
            one.endpoint,
            str(one.layers),
            format_bytes(one.size_bytes),
            ", ".join(map(str, one.versions)),
            _ago(one.heard_ago_s),
        )
    return table


def _links(status: "MasterStatus") -> Table:
    table = Table("cluster", "shard", "way", "layers", "bytes", "rate of late")
    for one in status.links:
        table.add_row(
            one.cluster, one.shard, one.way, str(one.layers), format_bytes(one.size_bytes),
            format_bandwidth(one.bytes_per_s),
        )  # fmt: skip
    return table


def show_placement(found: "ShardPlacement") -> None:
    """Print where shards belong, and each place by itself."""
    console = console_for_people(_PLAIN_WIDTH)
    shards = Table("shard", "place")
    for shard, place in found.places.items():
        shards.add_row(shard, place)
    console.print(shards)
    say(console, found.reason)
    clusters = list(found.exchange_s)
    table = Table("all at", "an exchange", *clusters, "bandwidth × throughput", "memory", title="Each place by itself")
    for score in found.single:
        table.add_row(
            score.place,
            format_seconds(score.weighted_s),
            *(format_seconds(score.exchange_s[cluster]) for cluster in clusters),
            f"{score.paper_score:.3g}",
            "fits" if score.fits else "too little",
        )
    console.print(table)
    say(console, "an exchange: a push and a pull, mean over clusters by throughput; then each cluster's own. Bandwidth "
                 "× throughput is the Di-PS paper's figure: one fast link can win by it")  # fmt: skip


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f"{format_seconds(seconds)} ago"
