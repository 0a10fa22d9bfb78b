"""One trial of a model of the zoo: cut, planned over some devices, trained, and compared with plain PyTorch.

The computation of the stages is the program's own; there are no processes and no network.
"""

import copy
import functools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.cost.analytic import analytic_profile
from spantrain.errors import ConfigError
from spantrain.models.build import build_units, unit_source
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.segment import ONLY_CUT, compile_layers, is_compiled
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.randomness.draws import seeded
from spantrain.models.randomness.places import DrawnShapes
from spantrain.models.tracing.batch import ModelBatch, WholeMeans, picked
from spantrain.models.tracing.check import called_on
from spantrain.models.tracing.factory import uncompiled
from spantrain.models.tracing.model import cut_model
from spantrain.models.tracing.source import Loaded, load_model
from spantrain.models.units import LABELS, UnitModule, tie_parameters
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import Constraints, JobSpec, PlanRequest
from spantrain.planner.strategies.baselines import ONE_F_ONE_B

FOLDER = Path(__file__).parent
STEPS, RATE = 3, 0.1
FLOOR = 1e-2
"""Gradients below so much of the model's largest are compared with that: rounding of sums that all but cancel."""
EQUAL = 5e-5
"""Largest relative error that is rounding; where a mask or a sample is wrong it is far above."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of a model."""

    name: str
    """FAMILY.FUNCTION."""
    class_name: str = ""
    units: int = 0
    stages: int = 0
    error: float = 0.0
    """The largest relative one, of the losses and of the gradients of all parameters, in any step."""
    compiled: int = 0
    """Layers that are compiled, where that was wanted."""
    refused: str = ""
    crashed: str = ""
    """The exception and its place; nothing may crash."""


def names() -> list[str]:
    """Return all models of the zoo, as FAMILY.FUNCTION."""
    found = []
    for file in sorted(FOLDER.glob("*.py")):
        lines = file.read_text().splitlines() if file.name not in ("__init__.py", Path(__file__).name) else []
        functions = (line[4:-3] for line in lines if line.startswith("def ") and line.endswith("():"))
        found += [f"{file.stem}.{name}" for name in functions if not name.startswith("_")]
    return found


def tried(name: str, *, devices: int, compiled: bool = False) -> Trial:
    """Try a model over so many devices, its layers compiled or not; whatever happens is in what is returned."""
    family, _, function = name.partition(".")
    found = Trial(name=name)
    try:
        spec = resolve_model(f"{FOLDER / family}.py:{function}")
        found = _compared(found, replace(spec, compiled=compiled), devices)
    except ConfigError as error:
        found = replace(found, refused=str(error))
    except Exception as error:  # noqa: BLE001 - what a model crashes with is what is asked
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        found = replace(found, crashed=f"{type(error).__name__}: {str(error)[:300]} ({place})")
    return found


def _compared(found: Trial, spec: ModelSpec, devices: int) -> Trial:
    graph = build_graph(spec)
    plan = planned(spec, graph, devices)
    cut = cut_model(spec).whole
    whole = replace(load_model(spec, seed=0), trains=cut.trains, batch=cut.batch)
    found = replace(found, class_name=type(whole.module).__name__, units=len(graph.units), stages=len(plan.stages))
    return replace(found, compiled=_compiled_layers(spec), error=largest_error(spec, graph, plan, whole))


def _units(spec: ModelSpec) -> list[UnitModule]:
    """Build all units; layers that are to be compiled are cut as for that, and no code is made of them."""
    units = build_units(spec, seed=0)
    for unit in units:
        unit.compiled_by = unit.compiled_by and ONLY_CUT
    return units


def _compiled_layers(spec: ModelSpec) -> int:
    units = _units(spec) if spec.compiled else []
    compile_layers(units)
    return sum(is_compiled(layer) for unit in units for layer in unit.modules())


@functools.cache
def _cluster() -> Cluster:
    return load_preset("laptop")


def planned(spec: ModelSpec, graph: UnitGraph, devices: int) -> Plan:
    """Return the plan of equally many units on each device, which nothing was measured for."""
    cluster = _cluster()
    profile = analytic_profile(cluster, spec, graph)
    batch = unit_source(spec).batch().samples
    fewest = max(1, graph.fewest_samples(range(len(graph.units))))
    job = JobSpec(global_batch=batch, micro_batches=tuple(range(fewest, batch // 2 + 1)))
    out = tuple(device.name for device in cluster.devices[devices:])
    request = PlanRequest(
        profile=profile, job=job, constraints=Constraints(leave_out=out), evaluate=Evaluator(profile, job)
    )
    return ONE_F_ONE_B(request)[0].plan


def largest_error(spec: ModelSpec, graph: UnitGraph, plan: Plan, whole: Loaded) -> float:
    """Train by the plan's stages and in plain PyTorch; return the largest relative error of losses and gradients.

    Where samples depend on each other, plain PyTorch accumulates gradients over the plan's micro-batches.
    """
    units = _units(spec)
    held = [_copies(units[stage.first_unit : stage.end_unit]) for stage in plan.stages]
    stages = [
        StageExecutor(
            part, is_last=part is held[-1], global_batch=plan.global_batch, sums_samples=graph.sums_samples,
            fewest_samples=graph.fewest_samples(stage.units),
        )
        for part, stage in zip(held, plan.stages, strict=True)
    ]  # fmt: skip
    by_itself = not graph.fewest_samples(range(len(graph.units)))
    spans = [Span(0, plan.global_batch)] if by_itself else plan.stages[-1].micro_batches
    twins = _twins(held)
    own = [p for stage in stages for p in stage.named_parameters().values() if p.requires_grad]
    rate = RATE / plan.global_batch if graph.sums_samples else RATE
    optimizers = [
        torch.optim.SGD(some, lr=rate) for some in (own, [p for p in whole.module.parameters() if p.requires_grad])
    ]
    found = 0.0
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(_run_span(stages, whole.batch, span, step) for span in plan.stages[0].micro_batches)
        for parts in twins.values():
            summed = sum(p.grad for p in parts if p.grad is not None)
            for part in parts:
                part.grad = summed.clone() if isinstance(summed, Tensor) else None
        wanted = _plain_step(whole, spans, step, cut_model(spec).draws, sums=graph.sums_samples)
        found = max(found, abs(loss / plan.global_batch - wanted) / abs(wanted), _gradient_error(stages, whole.module))
        for optimizer in optimizers:
            optimizer.step()
    return found


def _plain_step(whole: Loaded, spans: Sequence[Span], step: int, shapes: DrawnShapes, *, sums: bool) -> float:
    whole.set_mode(trains=True)
    total, every = 0.0, whole.batch.samples
    for span in spans:
        batch = whole.batch.mapped(lambda tensor, span=span: tensor[span.lo : span.hi])
        counted = whole.batch.rows.get(whole.batch.counted) if len(spans) > 1 else None
        means = nullcontext() if counted is None else WholeMeans(batch.rows[LABELS], counted)
        with uncompiled(), means, seeded(whole.module, seed=0, step=step, first_sample=span.lo, shapes=shapes):
            result = picked(whole.loss, called_on(whole, batch), "plain")
            # The model's own loss times the samples.
            loss = whole.loss(result, batch.labels, span.size) / (span.size if sums else every)
            loss.backward()
        total += float(loss.detach())
    return total


def _run_span(stages: Sequence[StageExecutor], batch: ModelBatch, span: Span, step: int) -> float:
    rows = {number: tensor[span.lo : span.hi] for number, tensor in batch.rows.items()}
    tensors: tuple[Tensor, ...] = ()
    for stage in stages:
        tensors = stage.forward(span, tensors, {number: rows[number] for number in stage.reads}, step=step)
    gradients: tuple[Tensor, ...] = ()
    for stage in reversed(stages):
        # The first span in one piece, the others in halves.
        gradients = stage.backward(span, gradients) if span.lo == 0 else stage.backward_input(span, gradients)
    for stage in stages if span.lo else ():
        stage.backward_weight(span)
    return float(tensors[0])


def _copies(units: Sequence[UnitModule]) -> list[UnitModule]:
    """Return what another device has: its own parameters, tied among its own units."""
    memo: dict[int, object] = {}
    made = [copy.deepcopy(unit, memo) for unit in units]
    tie_parameters(made)
    return made


def _twins(held: Sequence[Sequence[UnitModule]]) -> Mapping[str, list[nn.Parameter]]:
    """Return the parameters that several stages have."""
    found: dict[str, dict[int, nn.Parameter]] = {}
    for units in held:
        for unit in units:
            for group, local in unit.shared.items():
                parameter = unit.get_parameter(local)
                found.setdefault(group, {})[id(parameter)] = parameter
    return {group: list(parts.values()) for group, parts in found.items()}


def _gradient_error(stages: Sequence[StageExecutor], model: nn.Module) -> float:
    wanted = dict(model.named_parameters(remove_duplicate=False))
    norms = {name: float(p.grad.norm()) for name, p in wanted.items() if p.grad is not None}
    least = FLOOR * max(norms.values())
    return max(_errors(stages, wanted, norms, least))


def _errors(
    stages: Sequence[StageExecutor], wanted: Mapping[str, nn.Parameter], norms: Mapping[str, float], least: float
) -> Iterator[float]:
    seen = set()
    for stage in stages:
        for name, parameter in stage.named_parameters().items():
            seen.add(id(wanted[name]))
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            other = wanted[name].grad
            difference = own if other is None else own - other
            yield float(difference.norm()) / max(norms.get(name, 0.0), least)
    yield from (norms[name] for name, parameter in wanted.items() if id(parameter) not in seen and name in norms)
