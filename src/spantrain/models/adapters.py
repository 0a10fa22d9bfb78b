"""Low-rank adapters in a library's model: named by a text or by `peft`'s configuration, made by `peft`.

Adapters are Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. A function of the user's may
return a model with any adapters of `peft`; here are those of models from a folder, as commands and workers name them.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from spantrain.config.files.json_codec import from_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.problems import shortened
from spantrain.core.records import Bounds, Positive, Record, bound_problems, type_problems
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

LORA = "lora"
"""The field of a spec's config that holds the form of adapters as JSON."""
FROZEN = "frozen"
"""The field that names, a line each, the parameters of a library's model that are not trained."""
_KEYS = {
    "r": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "dropout": "lora_dropout",
    "rslora": "use_rslora",
}
_WRITTEN = "wanted e.g. r=8,alpha=16,targets=q_proj+v_proj,dropout=0,rslora=false"
_NOT_SETTINGS = ("task_type", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version")
_TASKS: Mapping[str, str] = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
HEAD = ".original_module."
"""In the name of a parameter of a head that is trained in full beside adapters."""
_HEADS = ("classifier", "score", "qa_outputs")
"""What `peft` takes for a classifier's head, which begins with random numbers as a rule: it is trained in full."""
_HAVE_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "SemanticSegmentation")
"""In the names of classes that are a pretrained body and a head."""


class LoraForm(Record):
    """What adapters are like, in the words of `peft.LoraConfig`."""

    r: Annotated[int, Bounds(low=1, high=65536)] = 8
    lora_alpha: Positive = 8
    target_modules: tuple[str, ...] = ()
    """Ends of modules' names, or `all-linear` alone; none: what `peft` knows of the model's type."""
    lora_dropout: Annotated[float, Bounds(low=0, under=1)] = 0.0
    use_rslora: bool = False
    trains_head: bool = True
    """Whether the head of a classifier is trained in full, as by `peft` where its task is given."""

    def __post_init__(self) -> None:
        problems = type_problems(self) or bound_problems(self)
        if not all(isinstance(name, str) and name for name in self.target_modules):
            problems.append(f"target_modules must be names of modules, got {self.target_modules!r}")
        if self.use_rslora not in (True, False):
            problems.append(f"use_rslora must be true or false, got {self.use_rslora!r}")
        if problems:
            raise ConfigError(f"lora: {shortened('; '.join(problems))}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the form that a command line names.

        Raises:
            ConfigError: it is written otherwise, or a value is none.

        >>> LoraForm.parse("r=4,alpha=16,targets=q_proj+v_proj").target_modules
        ('q_proj', 'v_proj')
        """
        fields: dict[str, Any] = {}
        for entry in text.split(","):
            key, _, value = entry.strip().partition("=")
            if key not in _KEYS or not value or _KEYS[key] in fields:
                raise ConfigError(f"lora: {shortened(repr(entry))} is not understood; {_WRITTEN}")
            try:
                fields[_KEYS[key]] = tuple(value.split("+")) if key == "targets" else json.loads(value)
            except ValueError:
                raise ConfigError(f"lora: {key} is {shortened(repr(value))}; {_WRITTEN}") from None
        return cls(**fields)

    @classmethod
    def of(cls, config: object) -> Self | None:
        """Return the form of a `peft.LoraConfig`, or that a text names; None of None.

        Raises:
            ConfigError: it is of other adapters, or sets what is not done here.
        """
        if config is None or isinstance(config, str):
            return None if config is None else cls.parse(config)
        _check_installed()
        from peft import LoraConfig

        if not isinstance(config, LoraConfig):
            raise ConfigError(
                f"peft_config: a {type(config).__name__} is not done here, LoraConfig is; for other adapters return "
                "get_peft_model(model, config) from the function that makes the model"
            )
        plain, given = vars(LoraConfig()), vars(config)
        changed = [name for name in given if given[name] != plain.get(name) and name not in _NOT_SETTINGS]
        others = [name for name in changed if name not in _KEYS.values()]
        if others:
            raise ConfigError(
                f"peft_config: {', '.join(others)} cannot be set here (known: {', '.join(_KEYS.values())}); return "
                "get_peft_model(model, config) from the function that makes the model"
            )
        targets = given["target_modules"] or ()
        names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
        own = {name: given[name] for name in changed if name != "target_modules"}
        return cls(**own, target_modules=names, trains_head=bool(given["task_type"]))


def with_lora(spec: ModelSpec, form: LoraForm | None) -> ModelSpec:
    """Return a model from a folder with adapters; None leaves it as it is.

    Raises:
        ConfigError: the model is of a function or the catalogue, or `peft` is not installed.
    """
    if form is None:
        return spec
    if spec.family != "hf":
        raise ConfigError(
            f"lora: model {spec.name} is not from a folder (hf:FOLDER): return get_peft_model(model, LoraConfig(...)) "
            "from the function that makes the model"
        )
    _check_installed()
    return replace(spec, config={**spec.config, LORA: json.dumps(asdict(form), sort_keys=True)})


def adapted(spec: ModelSpec, module: "nn.Module") -> "nn.Module":
    """Freeze what a model's spec names, and put adapters into it, if it names some; then nothing else is trained.

    Raises:
        ConfigError: `peft` is not installed, the spec's adapters are none, or the model has no such modules.
    """
    for name in str(spec.config.get(FROZEN, "")).split():
        module.get_parameter(name).requires_grad_(False)
    if LORA not in spec.config:
        return module
    where = f"model {spec.name}: its adapters"
    form = from_json(LoraForm, parse_json(str(spec.config[LORA]), where, remedy="plan again"), where)
    _check_installed()
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    targets: Any = "all-linear" if form.target_modules == ("all-linear",) else [*form.target_modules] or None
    name, fields = type(module).__name__, asdict(form)
    task = next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)
    heads = _heads_of(module)
    if not fields.pop("trains_head") and heads:
        heads, task = [], None
    settings = LoraConfig(**{**fields, "target_modules": targets, "modules_to_save": heads or None}, task_type=task)
    try:
        with _unregistered():
            made: nn.Module = get_peft_model(module, settings)
    except ValueError as error:
        linear = (path for path, part in module.named_modules() if type(part).__name__ in ("Linear", "Conv1D"))
        names = "+".join(dict.fromkeys(path.rpartition(".")[2] for path in linear))
        why = f"of {name} peft knows none" if targets is None else str(error)
        raise ConfigError(f"lora: targets: {why}; give targets=all-linear, or some of {names or 'none'}") from None
    for part in made.modules():
        if isinstance(part, LoraLayer):
            _begin_anew(part)
        elif isinstance(part, ModulesToSaveWrapper):  # a head is trained itself, not a copy of it
            part.modules_to_save["default"] = part.original_module.requires_grad_(True)
    return made


def _heads_of(module: "nn.Module") -> list[str]:
    """Return the modules of a model that are no part of its pretrained body, whatever they are called."""
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    body = getattr(module, "base_model_prefix", "")
    if body not in children or not any(words in type(module).__name__ for words in _HAVE_HEADS):
        return [name for name in _HEADS if name in children]
    inside = [path for path, _ in children[body].named_modules()]  # `peft` goes by ends of names
    return [name for name in children if name != body and not any(path.endswith(name) for path in inside)]


@contextmanager
def _unregistered() -> Iterator[None]:
    """Keep what is made for a moment from those who number or replace parameters: `peft` moves and drops it."""
    from torch.nn.modules.module import _global_parameter_registration_hooks as hooks

    kept = dict(hooks)
    hooks.clear()
    try:
        with warnings.catch_warnings():  # a head without numbers is copied, and the copy dropped
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks for it
            yield
    finally:
        hooks.update(kept)


def _begin_anew(layer: Any) -> None:
    """Give a layer parameters that are registered as all are, and its own first numbers.

    `peft` moves its parameters to where those of the base are, which may be empty: they would lose their numbers.
    """
    import torch
    from torch import nn

    for name in layer.adapter_layer_names:
        holder = getattr(layer, name, None)
        for part in holder.modules() if isinstance(holder, nn.Module) else ():
            for key, old in list(part._parameters.items()):
                if old is not None:
                    part._parameters.pop(key)
                    part.register_parameter(key, nn.Parameter(torch.empty(old.shape), requires_grad=old.requires_grad))
    layer.reset_lora_parameters("default", True)


def base_name(spec: ModelSpec, name: str) -> str | None:
    """Return the name that a tensor has in the model without adapters; None: it belongs to an adapter."""
    if LORA not in spec.config:
        return name
    for inside in (".base_layer.", HEAD, ".modules_to_save.default."):
        name = name.replace(inside, ".")
    return None if ".lora_" in name else name.removeprefix("base_model.model.")


def _check_installed() -> None:
    import importlib.util

    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora: peft is not installed here; pip install 'spantrain[peft]', on all machines of the run")
