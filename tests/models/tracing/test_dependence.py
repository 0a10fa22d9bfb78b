"""Losses and blocks to which a sample is not by itself: found, told, and refused where too few samples are at once."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.errors import ConfigError, PlanError
from spantrain.models.build import build_units, unit_source
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.sources import hf_spec
from spantrain.models.units import COUNTED, LABELS, counted_labels, parameter_names
from spantrain.schedule.at_once import about_samples, check_samples_at_once
from testing.models import handed_on, own_models
from testing.models.zoo.trial import FOLDER, planned

pytestmark = pytest.mark.models

ROUTED = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256,
    "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip
FILES = {"own": own_models.__file__, "handed_on": handed_on.__file__}


def spec_of(name: str) -> ModelSpec:
    family, _, function = name.partition(".")
    return resolve_model(f"{FILES.get(family) or FOLDER / f'{family}.py'}:{function}")


@cache
def graph_of(name: str) -> UnitGraph:
    return build_graph(spec_of(name))


def in_micro_batches_of(size: int, name: str) -> Plan:
    plan = planned(spec_of(name), graph_of(name), 2)
    spans = tuple(Span(lo, lo + size) for lo in range(0, plan.global_batch, size))
    return replace(plan, stages=tuple(replace(stage, micro_batches=spans) for stage in plan.stages))


@pytest.mark.parametrize(
    ("name", "unit", "fewest", "why"),
    [
        ("pictures.clip", -1, 2, "the loss of model.text_projection is over all samples at once"),
        ("plain.contrastive", -1, 2, "the loss of right.3 is over all samples at once"),
        ("decoders.qwen3_moe_balanced", -1, 1, "a term of the loss of lm_head is over all samples"),
        ("handed_on.a_small_term_of_all_samples", -1, 1, "a term of the loss of head is over all samples"),
        ("own.weighed_samples", -1, 1, "the loss of blocks.1 is over all samples at once"),
        ("own.pairs", -1, 1, "the loss of blocks.1 is over all samples at once"),
        ("own.decides_inside", 1, 1, "blocks.1 decides by numbers of its data, at .*own_models.py:169"),
        ("plain.branches_on_data", 1, 1, r"blocks.1 decides by numbers of its data, at .*plain.py:\d+"),
        ("plain.branches_on_a_batch", 1, 1, r"blocks.1 decides by numbers of its data, at .*plain.py:\d+"),
    ],
)
def test_what_a_sample_depends_on_is_found_and_told(name, unit, fewest, why):
    graph = graph_of(name)
    (index,) = [n for n, one in enumerate(graph.units) if one.whole_micro_batch]
    found = graph.units[index].whole_micro_batch
    assert (index, found.fewest) == (unit % len(graph.units), fewest)
    assert graph.fewest_samples(range(index)) == 0
    (line,) = about_samples(in_micro_batches_of(2, name), graph)
    assert "under this plan of 2 to 2 samples" in line
    assert re.search(why, line), line


@pytest.mark.parametrize("name", ["pairs.wav2vec2_ctc", "plain.summed"])
def test_a_loss_that_is_a_sum_is_told(name):
    graph = graph_of(name)
    assert graph.sums_samples
    assert graph.fewest_samples(range(len(graph.units))) == 0
    (line,) = about_samples(in_micro_batches_of(2, name), graph)
    assert line.startswith("The loss is a sum over samples: a step's is over all ")


@pytest.mark.parametrize("name", ["decoders.llama_padded", "plain.vae", "pairs.wav2vec2_ctc_padded", "plain.mixture"])
def test_where_samples_are_by_themselves_nothing_is_told(name):
    assert list(about_samples(in_micro_batches_of(2, name), graph_of(name))) == []


def test_too_few_samples_at_once_are_refused_before_and_while_training():
    name = "plain.contrastive"
    check_samples_at_once(in_micro_batches_of(2, name), graph_of(name))
    with pytest.raises(PlanError, match=r"stage 1: runs 1 sample at once, and the loss of right\.3 .* fewer than 2"):
        check_samples_at_once(in_micro_batches_of(1, name), graph_of(name))
    executor = StageExecutor(build_units(spec_of(name), seed=0), is_last=True, global_batch=6, fewest_samples=2)
    assert executor.keeps_spans
    rows = {number: row[:1] for number, row in unit_source(spec_of(name)).batch().rows.items()}
    with pytest.raises(ConfigError, match=r"samples \[0:1\].* fewer than 2 nothing is learnt; plan larger"):
        executor.forward(Span(0, 1), (), rows)


def test_routers_of_a_configuration_are_balanced_as_the_library_does(tmp_path: Path):
    """Gradients accumulated over two micro-batches, in the library's own model with the same weights."""
    (tmp_path / "config.json").write_text(json.dumps(ROUTED))
    spec = hf_spec(f"hf:{tmp_path}", sequence_length=8)
    graph = build_graph(spec)
    assert graph.left_out == ()
    assert "balances its routers" in graph.units[-1].whole_micro_batch.why
    assert [len(unit.outputs) for unit in graph.units] == [1, 2, 3, 4, 5, 0], "logits of all routers cross the cuts"
    words, spans = torch.randint(0, 256, (6, 9)), (Span(0, 4), Span(4, 6))
    units = build_units(spec, seed=0)
    stages = [StageExecutor(units[:3], is_last=False, global_batch=6)]
    stages.append(StageExecutor(units[3:], is_last=True, global_batch=6, fewest_samples=1))
    model, loss_sum, wanted = unit_source(spec).unsplit(seed=0)[0], 0.0, 0.0
    for span in spans:
        own = words[span.lo : span.hi]
        rows = {0: own[:, :-1], LABELS: own[:, 1:], COUNTED: counted_labels(words[:, 1:], span.size)}
        between = stages[0].forward(span, (), {0: rows[0]})
        loss_sum += float(stages[1].forward(span, between, rows)[0])
        gradients = stages[1].backward_input(span, ())
        stages[1].backward_weight(span)
        stages[0].backward(span, gradients)
        made = model(input_ids=rows[0])
        loss = functional.cross_entropy(made.logits.flatten(0, 1), rows[LABELS].flatten()) + 0.5 * made.aux_loss
        (loss * span.size / 6).backward()
        wanted += float(loss.detach()) * span.size
    assert loss_sum == pytest.approx(wanted, rel=1e-6)
    for unit in units:
        for local, full in parameter_names(unit).items():
            torch.testing.assert_close(unit.get_parameter(local).grad, model.get_parameter(full).grad)
