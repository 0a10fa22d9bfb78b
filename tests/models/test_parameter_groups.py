"""Groups of parameters: the transformers library's rule, a user's; the same parameters in every plan."""

from dataclasses import replace
from random import Random

import pytest
import torch
import transformers

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.job import TrainJob
from spantrain.errors import ConfigError
from spantrain.models.build import unit_names, unit_source, whole_parameters
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.parameter_groups import with_groups
from spantrain.runtime.gradients.optimizer import build_optimizer, learning_rate, set_rates

JOB = TrainJob(steps=6, weight_decay=0.1, learning_rate=0.01, warmup_steps=2, lr_schedule="linear", decay_steps=6)
FAMILIES = {
    "llama": transformers.LlamaConfig(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    ),
    "gpt2": transformers.GPT2Config(vocab_size=260, n_embd=16, n_layer=4, n_head=2, n_positions=32),
    "bert": transformers.BertConfig(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    ),
}


@pytest.fixture(params=FAMILIES)
def spec(request, tmp_path):
    config = FAMILIES[request.param]
    config.architectures = [
        {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}[request.param]
    ]
    config.save_pretrained(tmp_path)
    return resolve_model(f"hf:{tmp_path}", sequence_length=8)


def test_what_does_not_decay_is_what_the_transformers_library_leaves_out(spec):
    module = unit_source(spec).unsplit(seed=0, weights=False)[0]
    decays = transformers.Trainer.get_decay_parameter_names(None, module)
    (group,) = with_groups(JOB, spec).parameter_groups
    own = {name for name, _ in module.named_parameters()}
    assert own & set(group.names) == own - set(decays)
    assert group.options == {"weight_decay": 0.0}
    assert len(unit_names(spec)) > 4
    named = {name for first, one in whole_parameters(spec).items() for name in (first, *one.other_names)}
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert own - set(decays) <= named <= every, "as units name them"


def test_a_rule_of_ones_own(spec):
    def rule(name, parameter):
        assert parameter.shape is not None
        return {"lr": 0.5, "betas": (0.5, 0.6)} if parameter.dim() == 1 else {}

    job = with_groups(JOB, spec, rule)
    (group,) = job.parameter_groups
    assert from_json(TrainJob, to_json(job), "job") == replace(
        job, parameter_groups=(replace(group, options={"lr": 0.5, "betas": [0.5, 0.6]}),)
    )
    shapes = {name: one.shape for name, one in whole_parameters(spec).items()}
    names = list(shapes)
    Random(1).shuffle(names)
    part = names[: len(names) // 2]
    parameters = {name: torch.nn.Parameter(torch.ones(shapes[name])) for name in part}
    optimizer = build_optimizer(job, parameters.values(), parameters)
    set_rates(optimizer, job, 4)
    for one in optimizer.param_groups:
        for parameter in one["params"]:
            assert (one["betas"], one["lr"]) == (
                ((0.5, 0.6), 0.25) if parameter.dim() == 1 else ((0.9, 0.999), learning_rate(job, 4))
            )
    assert sum(len(one["params"]) for one in optimizer.param_groups) == len(part)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda _name, _parameter: None, "returns None; wanted a dict"),
        (lambda _name, _parameter: {"lr": -1.0}, "learning_rate must be more than 0, got -1.0"),
        (lambda _name, _parameter: {"weight_decy": 1.0}, "weight_decy"),
        (lambda name, _parameter: {"lr": 1.0 / len(name[:0])}, "the function raises at .*ZeroDivisionError"),
        (lambda _name, parameter: {"amsgrad": parameter.dim() == 1}, "changes the state of adamw is for all"),
    ],
)
def test_rules_that_make_no_sense(rule, says):
    with pytest.raises(ConfigError, match=rf"parameter groups: .*{says}"):
        with_groups(JOB, resolve_model("gpt2-tiny"), rule)
