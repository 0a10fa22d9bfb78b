"""What a person sees of steps: a bar on a terminal, as wide as it is; lines now and then elsewhere."""

import contextlib
import io
import re

import pytest
from rich.console import Console

from spantrain.app.reporter import DrawingReporter
from spantrain.app.training.metrics import EvaluationMetrics, StepMetrics

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def metrics(step: int, step_s: float = 2.0, **given) -> StepMetrics:
    common = {"loss": 2.5, "learning_rate": 1e-3, "grad_norm": 0.5, "samples_per_s": 16 / step_s}
    return StepMetrics(step=step, step_s=step_s, tokens_per_s=64 * 16 / step_s, **{**common, **given})


def console(*, width: int, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, _environ={})


class Reporter(DrawingReporter):
    more: tuple[str, ...] = ()

    def more_lines(self, outcome) -> tuple[str, ...]:
        return self.more


def written(found: Console) -> str:
    assert isinstance(found.file, io.StringIO)
    return found.file.getvalue()


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (110, "3/9  loss 2.5000  |grad| 0.50  8.0 samples/s  512 tokens/s  0:12 left"),
        (60, "3/9  loss 2.5000  8.0 samples/s  0:12 left"),
        (40, "3/9  loss 2.5000  0:12 left"),
        (20, "3/9  loss"),
    ],
)
def test_a_bar_fits_the_terminal_and_leaves_it_whole(width, line):
    found = console(width=width, terminal=True)
    with contextlib.suppress(KeyboardInterrupt), Reporter(found, every=10) as display:
        display.more = ("  bubble  " + "stage 0: 10%  " * 20,)
        for step in (1, 2, 3):
            display.step(None, metrics(step), 9)
        raise KeyboardInterrupt
    text = written(found)
    assert line in text
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", row) for row in re.split(r"[\r\n]+", text)]
    assert max(len(row) for row in shown) <= width


def test_elsewhere_lines_are_few_and_at_least_one_a_minute():
    found = console(width=120, terminal=False)
    with Reporter(found, every=10) as display:
        display.more = ("  more",)
        for step in range(1, 26):
            display.step(None, metrics(step), 25)
        display.phase("  more of it")
        for step in range(1, 4):
            display.step(None, metrics(step, step_s=45.0), 3000)
        display.evaluated(EvaluationMetrics(step=25, eval_loss=3.0))
    lines = [line for line in written(found).splitlines() if "more" not in line]
    assert [line.split()[1] for line in lines[:-1]] == ["1/25", "10/25", "20/25", "25/25", "2/3000"]
    assert lines[0] == "  step 1/25  loss 2.5000  |grad| 0.50  8.0 samples/s  512 tokens/s  0:48 left"
    assert lines[-2].endswith("1 d 13:28 h left")
    assert lines[-1] == "  held-out loss 3.0000 after 25 steps"


def test_lines_are_as_narrow_as_is_asked_and_nothing_is_said_where_nothing_is_wanted():
    found = console(width=50, terminal=False)
    Reporter(found, every=1).step(None, metrics(1, skipped=True), 9)
    assert written(found) == "  step 1/9  loss 2.5000  not updated: gradients overflowed\n"
    silent = console(width=50, terminal=True)
    with Reporter(silent, every=0) as display:
        display.step(None, metrics(1), 9)
        display.progress(1, 2, "rounds")
        display.evaluated(EvaluationMetrics(step=1, eval_loss=3.0))
    assert written(silent) == ""
