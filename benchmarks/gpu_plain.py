"""The plain PyTorch loop that `gpu.py` compares with, in a process of its own."""

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gpu_cases import Case
from spantrain.devices.registry import open_device
from spantrain.formats.precision import LOW_WEIGHTS

JOB = {"learning_rate": 3e-4, "warmup_steps": 0, "max_grad_norm": 1.0}
WARM_UP = 2
"""Steps that count in no row."""


class Weights:
    """What is updated: the model's parameters, or float32 ones of which a model in bfloat16 has copies."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.copies = list(model.parameters()) if dtype == LOW_WEIGHTS else []
        self.full = [nn.Parameter(one.detach().clone()) for one in self.copies] or list(model.parameters())
        if self.copies:
            model.bfloat16()
        for copy, full in zip(self.copies, self.full, strict=False):
            copy.register_post_accumulate_grad_hook(partial(_hand_over, full))

    def refresh(self) -> None:
        """Round them anew."""
        if self.copies:
            torch._foreach_copy_([one.detach() for one in self.copies], [one.detach() for one in self.full])


def _hand_over(full: nn.Parameter, copy: nn.Parameter) -> None:
    gradient, copy.grad = copy.grad.float(), None
    if full.grad is None:
        full.grad = gradient
    else:
        full.grad += gradient


def compile_layers(model: nn.Module) -> None:
    """Have layers that repeat compiled, once for all of a kind."""
    for layers in model.modules():
        for layer in layers if isinstance(layers, nn.ModuleList) else ():
            layer.compile()


def plain_loop(case: Case, backend: str, dtype: str, micro_batch: int, steps: int, compiled: bool) -> dict[str, Any]:
    """Train as a PyTorch user does; return seconds of steps, the peak, and the losses."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = open_device(backend).torch_device
    fields = {key: value for key, value in case.config.items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(case.config["model_type"], use_cache=False, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    weights = Weights(model, dtype)
    if compiled:
        compile_layers(model)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(weights.full, lr=JOB["learning_rate"], weight_decay=0.01, fused=fused)
    tokens = torch.randint(0, 256, (case.global_batch, case.sequence), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(steps + WARM_UP):
        start_s = time.perf_counter()
        weights.refresh()
        total = torch.zeros((), device=device)
        for part in tokens.split(micro_batch):
            with autocast:
                loss = model(input_ids=part, labels=part).loss * (len(part) / case.global_batch)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(weights.full, JOB["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        seconds.append(time.perf_counter() - start_s)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"step_s": statistics.median(seconds[WARM_UP:]), "peak_bytes": peak, "losses": tuple(losses)}


def _child(results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        results.put((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 - told to who waits for it
        results.put((False, traceback.format_exc()))


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function gives in a process of its own.

    Raises:
        RuntimeError: it failed there.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_child, args=(results, function, arguments), daemon=True)
    process.start()
    good, found = results.get()
    process.join()
    if not good:
        raise RuntimeError(found)
    return found
