"""The options of `spantrain plan`, and the job and the wishes that they make."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spantrain.cli.options import MAX_SAMPLES
from spantrain.errors import PlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.job import JobSpec
from spantrain.planner.request import Constraints, Objective, Quota, Restriction
from spantrain.schedule.registry import check_schedule

if TYPE_CHECKING:
    from spantrain.planner.engine.outcome import PlanWishes

GlobalBatch = Annotated[int, typer.Option(help="Samples per optimizer step.", min=1, max=MAX_SAMPLES)]
ProfilePath = Annotated[
    Path | None, typer.Argument(help="What `spantrain profile` wrote; else --preset or --cluster with --model.")
]
PlanOut = Annotated[Path | None, typer.Option("--out", help="The plan file to write; left out: nothing is.")]
Model = Annotated[str | None, typer.Option(help="With --preset or --cluster: the model, e.g. gpt2-small.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the profile's.")]
StrategyNames = Annotated[str, typer.Option(help="`all`, or names with commas; default: the planner's own.")]
Wanted = Annotated[Objective, typer.Option(help="What is wanted least or most of.")]
Schedule = Annotated[str, typer.Option(help="Order of work the plan is made for; `auto`: try all on the best plans.")]
Optimizer = Annotated[str, typer.Option(help="adamw or sgd: it decides the memory for its state.")]
MinThroughput = Annotated[float | None, typer.Option(help="Samples per second, at least.")]
MaxStepS = Annotated[float | None, typer.Option(help="Seconds per step, at most.")]
MaxMoneyPerStep = Annotated[float | None, typer.Option(help="US dollars per step, at most.")]
MaxMoneyPerHour = Annotated[float | None, typer.Option(help="US dollars per hour, at most.")]
Quotas = Annotated[
    list[str] | None,
    typer.Option("--quota", help="KIND=N or SITE/KIND=N: the most devices of a kind; repeatable."),
]
LeaveOut = Annotated[list[str] | None, typer.Option(help="A device or site not to use; repeatable.")]
Keep = Annotated[list[str] | None, typer.Option(help="A device or site that must be used; repeatable.")]
AllowWire = Annotated[
    list[WireFormat] | None, typer.Option("--allow-wire", help="What cuts between sites may be rounded to.")
]
AllowShardedState = Annotated[
    bool, typer.Option("--allow-sharded-state", help="Replicas of a stage may divide state (not trained yet).")
]
AllowTensorParallel = Annotated[
    bool, typer.Option("--allow-tensor-parallel", help="auto: devices of a host may divide tensors.")
]
Recompute = Annotated[
    bool, typer.Option("--recompute/--no-recompute", help="Compute activations again where memory is short.")
]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="Devices that divide tensors hold slices of the sequence too.")
]
AllowOuter = Annotated[
    bool, typer.Option("--allow-outer", help="Groups may train by themselves, joined by an outer optimizer.")
]
OuterEvery = Annotated[int, typer.Option(help="Inner steps between two outer ones.", min=1, max=10**9)]
Restrict = Annotated[
    Restriction, typer.Option(help="megatron: only plans that Megatron-like frameworks run; for `auto`.")
]

_STATE_OF = {"sgd": "momentum"}
"""The optimizer by the state that it keeps: SGD is run with momentum."""
_QUOTA = re.compile(r"(?:(?P<site>[^/=]+)/)?(?P<kind>[^/=]+)=(?P<count>\d+)")
_ANY = "auto"
"""As a schedule: all are tried."""


def job_of(given: Mapping[str, Any]) -> JobSpec:
    """Return the job that the options, by name, describe.

    Raises:
        UsageError: a value is not one of those that there are.
    """
    schedule, optimizer = given["schedule"], given["optimizer"]
    return JobSpec(
        global_batch=given["global_batch"],
        optimizer=_STATE_OF.get(optimizer, optimizer),
        dtype=given["dtype"],
        schedule="critical-path" if schedule == _ANY else check_schedule(schedule),
    )


def wishes_of(given: Mapping[str, Any]) -> "PlanWishes":
    """Return what the options, by name, wish of a plan.

    Raises:
        PlanError: a value makes no sense, or two contradict each other.
    """
    from spantrain.planner.engine.outcome import PlanWishes

    return PlanWishes(
        objective=Objective(given["objective"]),
        constraints=_constraints(given),
        strategies=_strategies(given["strategy"]),
        any_schedule=given["schedule"] == _ANY,
        restriction=Restriction(given["restrict"]),
        allow_outer=given["allow_outer"],
        outer_every=given["outer_every"],
    )


def _constraints(given: Mapping[str, Any]) -> Constraints:
    allowed = (WireFormat(name) for name in given["allow_wire"] or ())
    return Constraints(
        min_samples_per_s=_limit(given, "min_throughput"),
        max_step_s=_limit(given, "max_step_s"),
        max_usd_per_step=_limit(given, "max_money_per_step"),
        max_usd_per_hour=_limit(given, "max_money_per_hour"),
        quotas=tuple(_quota(text) for text in given["quota"] or ()),
        leave_out=tuple(given["leave_out"] or ()),
        keep=tuple(given["keep"] or ()),
        wire_formats=tuple(dict.fromkeys((WireFormat.NATIVE, *allowed))),
        tensor_parallel=given["allow_tensor_parallel"],
        recompute=given["recompute"],
        sequence_parallel=given["sequence_parallel"],
        sharded_state=given["allow_sharded_state"],
    )


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not names:
        raise PlanError(f"--strategy {text!r}: names no strategy; write names with commas, or `all`")
    return names


def _limit(given: Mapping[str, Any], name: str) -> float | None:
    value: float | None = given[name]
    if value is not None and not 0 < value < float("inf"):
        raise PlanError(f"--{name.replace('_', '-')} {value:g}: give a number over 0, or leave it out")
    return value


def _quota(text: str) -> Quota:
    found = _QUOTA.fullmatch(text)
    if found is None:
        raise PlanError(f"--quota {text}: write KIND=N or SITE/KIND=N, e.g. --quota cloud/a100=4")
    return Quota(kind=found["kind"], count=int(found["count"]), site=found["site"])
