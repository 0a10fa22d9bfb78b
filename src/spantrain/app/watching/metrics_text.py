"""Metrics in the text that Prometheus reads; their names stay (docs/page.md)."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Sample = tuple[Mapping[str, Any], float | None]
"""Labels and value; None is left out."""


def metrics_text(families: Iterable[tuple[str, str, str, Iterable[Sample]]]) -> str:
    """Return families of metrics (name without `spantrain_`, kind, help, samples) as text; none without samples.

    >>> print(metrics_text([("steps_total", "counter", "Steps done.", [({"run": "a"}, 3)])]), end="")
    # HELP spantrain_steps_total Steps done.
    # TYPE spantrain_steps_total counter
    spantrain_steps_total{run="a"} 3
    """
    lines = []
    for name, kind, help_, samples in families:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines += [f"# HELP spantrain_{name} {help_}", f"# TYPE spantrain_{name} {kind}"]
            lines += [f"spantrain_{name}{_labels(labels)} {value!r}" for labels, value in known]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, Any]) -> str:
    shown = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def metrics_of_view(content: bytes | None) -> str:
    """Return the metrics of a run from what there is to see of it, `view.json`; nothing where that is not there yet."""
    if content is None:
        return ""
    view: dict[str, Any] = json.loads(content)
    run = {"run": view["run"]}
    devices = [({**run, "device": one["name"], "site": one["site"]}, one) for one in view["devices"]]
    links = [({**run, "source": one["source"], "target": one["target"]}, one) for one in view["links"]]

    def single(value: float | None) -> list[Sample]:
        return [(run, value)]

    def of_devices(field: str) -> list[Sample]:
        return [(labels, one[field]) for labels, one in devices]

    def of_links(field: str) -> list[Sample]:
        return [(labels, one[field]) for labels, one in links]

    done, step_s = view["steps_done"], view["step_s"]
    samples = view["global_batch"] / step_s if step_s else None
    told = {**run, "model": view["model"], "schedule": view["schedule"]}
    return metrics_text(
        [
            ("run_info", "gauge", "The run.", [(told, 1)]),
            ("run_running", "gauge", "1 while the run goes on.", single(int(view["state"] == "running"))),
            ("run_updated_seconds", "gauge", "When this was true, since 1970.", single(view["updated_unix_s"])),
            ("steps_total", "counter", "Steps done.", single(done)),
            ("steps_wanted", "gauge", "Steps wanted in all.", single(view["steps"])),
            ("plan_generation", "gauge", "Number of the plan that runs.", single(view["generation"])),
            ("loss", "gauge", "Of the last step.", single(view["losses"][-1][1] if view["losses"] else None)),
            ("eval_loss", "gauge", "Of the last evaluation.",
             single(view["evaluations"][-1][1] if view["evaluations"] else None)),
            ("step_seconds", "gauge", "Duration of the last step.", single(step_s)),
            ("step_forecast_seconds", "gauge", "The same as simulated.", single(view["step_s_forecast"])),
            ("samples_per_second", "gauge", "In the last step.", single(samples)),
            ("tokens_per_second", "gauge", "In the last step.", single(view["tokens_per_s"])),
            ("device_busy_ratio", "gauge", "Computing, over the last step.", of_devices("busy_ratio")),
            ("device_busy_forecast_ratio", "gauge", "The same as simulated.", of_devices("busy_ratio_forecast")),
            ("device_memory_bytes", "gauge", "What the device has.", of_devices("memory_bytes")),
            ("device_peak_bytes", "gauge", "The most that its tensors held at once.", of_devices("peak_bytes")),
            ("device_peak_forecast_bytes", "gauge", "The same as simulated.", of_devices("peak_bytes_forecast")),
            ("device_held_samples", "gauge", "Most samples held at once.", of_devices("held_samples")),
            ("link_bytes_per_second", "gauge", "What messages got, as measured.", of_links("bytes_per_s")),
            ("link_planned_bytes_per_second", "gauge", "What the plan was made for.", of_links("planned_bytes_per_s")),
            ("link_used_bytes_per_second", "gauge", "Carried in the last step.", of_links("used_bytes_per_s")),
        ]
    )  # fmt: skip
