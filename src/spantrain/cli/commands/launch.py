"""`spantrain launch`: another command of SpanTrain, with its workers started on the machines that it needs."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.options import given_options, with_options, words_of
from spantrain.core.names import is_name
from spantrain.core.records import Record
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from spantrain.app.launch.way import LaunchOptions, LaunchWay

_COMMANDS = ("train", "profile")
_WAYS = ("ssh", "docker", "slurm", "kubernetes", "ray", "skypilot")
_PORT = 7000
"""Where workers join that are started before, or without, the coordinator: it must be known to them."""
_ANYWHERE = "192.0.2.1:9"
"""An address that no machine has (RFC 5737), behind the way to all others."""


class LaunchArguments(Record):
    """The options of `spantrain launch`."""

    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="train or profile, as without `launch`, with its options."),
    ]
    ssh: Annotated[bool, "Reach each host of the cluster by ssh."] = False
    docker: Annotated[bool, "As --ssh, in a container of --image on each host."] = False
    slurm: Annotated[bool, "Submit a job for each site; hosts are its nodes."] = False
    kubernetes: Annotated[bool, "A JobSet for each site, of pods with --image; hosts are its nodes."] = False
    ray: Annotated[bool, "An actor for each worker, on the Ray cluster that RAY_ADDRESS names."] = False
    skypilot: Annotated[bool, "Write a task for each site; `sky launch` starts it."] = False
    code: Annotated[Path | None, "Folder or wheel of yours that workers import from; copied once, by its hash."] = None
    python: Annotated[list[str] | None, "[HOST=]PATH of the interpreter that has SpanTrain; repeatable."] = None
    env: Annotated[list[str] | None, "[HOST:]NAME=VALUE in the environment of workers; repeatable."] = None
    option: Annotated[
        list[str] | None, "[HOST or SITE=]WORD for ssh, sbatch, kubectl, e.g. lab=--partition=gpu; repeatable."
    ] = None
    relay: Annotated[
        list[str] | None,
        "[HOST or SITE=]HOST:PORT of a `spantrain relay` that workers there dial, who can only dial out; its "
        "token: SPANTRAIN_RELAY_TOKEN; repeatable.",
    ] = None
    image: Annotated[str | None, "Of a container that has SpanTrain."] = None
    restarts: Annotated[
        int, typer.Option(help="How often a worker that fails is started again, with --ssh, --docker or --ray.", min=0)
    ] = 0
    dry_run: Annotated[bool, "Write what would be submitted into the run's folder, and no more."] = False


@with_options(LaunchArguments)
def launch(asked: LaunchArguments, context: typer.Context) -> None:
    """Start the workers of a command on all machines, with your code, and take them down at its end."""
    from spantrain.app.launch.way import OnlyWrittenError

    words = asked.command[1:] if asked.command[0] == "spantrain" else list(asked.command)
    if not words or words[0] not in _COMMANDS:
        raise ConfigError(f"launch: give `-- train ...` or `-- profile ...` behind its options, got {words[:1]}")
    given = given_options(context)
    command = ("spantrain", "launch", *words_of(asked, given, given.keys() - {"command"}))
    way = _way(asked, command, encrypted="--insecure" not in words)
    if way.only_writes and (words[0] != "train" or "--overwrite" in words):
        raise ConfigError("--dry-run: goes with `train`, and without --overwrite: what is written is of one new run")
    if not any(word.partition("=")[0] == "--listen" for word in words):
        from spantrain.transport.control.address import address_towards

        try:
            address = address_towards(_ANYWHERE)
        except ConfigError:
            raise ConfigError("this machine has no way to others; tell workers one: --listen HOST:PORT") from None
        words += ["--listen", f"{address}:{0 if asked.ssh or asked.docker or asked.ray else _PORT}"]
    try:
        context.find_root().command.main(words, prog_name="spantrain", obj=way)
    except OnlyWrittenError:
        typer.echo(f"Then start the coordinator that the workers join: {shlex.join(['spantrain', *words])}")


def _way(asked: LaunchArguments, command: tuple[str, ...], *, encrypted: bool) -> "LaunchWay":
    """Return how workers are started.

    Raises:
        ConfigError: options do not go together.
    """
    from spantrain.app.launch.kubernetes import KubernetesWorkers
    from spantrain.app.launch.ray import RayWorkers
    from spantrain.app.launch.skypilot import SkypilotTasks
    from spantrain.app.launch.slurm import SlurmWorkers
    from spantrain.app.launch.ssh import SshWorkers
    from spantrain.app.launch.way import LaunchedWorkers, LaunchWay

    chosen = [name for name in _WAYS if getattr(asked, name)]
    if len(chosen) != 1:
        raise ConfigError(f"launch: give one of {', '.join(f'--{name}' for name in _WAYS)}; {len(chosen)} are given")
    (name,) = chosen
    if asked.image is None and name in ("docker", "kubernetes"):
        raise ConfigError(f"--{name}: give --image IMAGE, a container that has SpanTrain")
    if asked.image is not None and name in ("ssh", "slurm", "ray"):
        raise ConfigError(f"--image: --{name} uses no container; leave it out, or give --docker or --kubernetes")
    if asked.restarts and name not in ("ssh", "docker", "ray"):
        raise ConfigError(f"--restarts: goes with --ssh, --docker and --ray, not with --{name}")
    if asked.dry_run and name in ("ssh", "docker", "ray"):
        raise ConfigError(f"--dry-run: --{name} writes no files; leave it out")
    kinds: dict[str, type[LaunchedWorkers]] = {
        "slurm": SlurmWorkers, "kubernetes": KubernetesWorkers, "ray": RayWorkers, "skypilot": SkypilotTasks,
    }  # fmt: skip
    return LaunchWay(
        workers=kinds.get(name, SshWorkers),
        options=_options(asked, encrypted=encrypted),
        command=command,
        only_writes=asked.dry_run or name == "skypilot",
        restarts=asked.restarts,
    )


def _options(asked: LaunchArguments, *, encrypted: bool) -> "LaunchOptions":
    from spantrain.app.launch.way import LaunchOptions
    from spantrain.app.relay import relay_access
    from spantrain.reach.code import PackedCode

    environment: dict[str, dict[str, str]] = {}
    for text in asked.env or ():
        left, given, value = text.partition("=")
        place, _, variable = left.rpartition(":")
        if not given or not variable.isidentifier():
            raise ConfigError(f"--env {text}: write NAME=VALUE, or HOST:NAME=VALUE")
        environment.setdefault(place, {})[variable] = value
    words: dict[str, tuple[str, ...]] = {}
    for place, text in map(_placed, asked.option or ()):
        try:
            words[place] = (*words.get(place, ()), *shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"--option {text}: {error}") from None
    relays = {place: relay_access(text, encrypted=encrypted) for place, text in map(_placed, asked.relay or ())}
    return LaunchOptions(
        code=PackedCode.of(asked.code) if asked.code else None,
        python=dict(map(_placed, asked.python or ())),
        environment=environment,
        relays={place: relay for place, relay in relays.items() if relay is not None},
        words=words,
        image=asked.image,
    )


def _placed(text: str) -> tuple[str, str]:
    """Return the host or site that something is said of, and what is said.

    >>> _placed("lab=--partition=gpu"), _placed("--partition=gpu")
    (('lab', '--partition=gpu'), ('', '--partition=gpu'))
    """
    place, given, value = text.partition("=")
    return (place, value) if given and is_name(place) else ("", text)
