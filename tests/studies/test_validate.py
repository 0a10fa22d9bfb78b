from dataclasses import replace
from pathlib import Path

import pytest

from spantrain_studies.reference.validate import excluded_figures, validate_reference
from testing.reference import (
    BACKWARD_S,
    BANDWIDTH,
    FORWARD_S,
    HIDDEN,
    MESSAGE_S,
    PARAMETERS,
    PLAIN,
    SEQUENCE,
    UPDATE_S,
    WORDS,
    case,
    files,
    write,
)

ALL = [0, 3]
REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"


def only(folder, **changes):
    """Validate a folder with one run; return that run."""
    found = validate_reference(folder, platform=replace(PLAIN, **changes))
    ((run,),) = [found.cases for found in found.sets.values()]
    return run


def update_s(layers: slice) -> float:
    return UPDATE_S * sum(PARAMETERS[layers]) / (sum(PARAMETERS) - PARAMETERS[2])


def test_one_device_takes_the_time_of_its_layers_and_the_update(tmp_path):
    run = only(write(tmp_path, files(case("one", [(ALL, ["fast"])]))))
    assert run.predicted_s == pytest.approx(4 * (sum(FORWARD_S) + sum(BACKWARD_S)) + update_s(slice(4)))
    assert run.measured_s == 30.0


def test_one_device_holds_state_activations_workspace_and_base(tmp_path):
    run = only(write(tmp_path, files(case("one", [(ALL, ["fast"])]))))
    state, activations, workspace = 24 * sum(PARAMETERS), 2 * 4 * (8 + 50 + 50 + 30), 2 * 2 * 4 * 50
    assert run.predicted_bytes == state + activations + workspace + 1000
    parts = run.byte_parts
    assert (parts.state_bytes, parts.activation_bytes, parts.workspace_bytes) == (state, activations, workspace)


def test_replicas_add_a_ring_sum_over_the_hosts_network(tmp_path):
    run = only(write(tmp_path, files(case("two", [(ALL, ["fast", "fast"])]))))
    sum_s = 4 * sum(PARAMETERS) / BANDWIDTH
    assert run.time_parts.gradient_sum_s == pytest.approx(sum_s)
    assert run.predicted_s == pytest.approx(4 * 7.6 + sum_s + update_s(slice(4)))


def test_the_sum_waits_for_the_slower_kind(tmp_path):
    run = only(write(tmp_path, files(case("two", [(ALL, ["fast", "slow"])]))))
    assert run.longest == "stage 0, slow"
    assert run.predicted_s == pytest.approx(8 * 7.6 + 4 * sum(PARAMETERS) / BANDWIDTH + update_s(slice(4)))


def test_sends_and_receives_stand_between_the_computations_of_a_stage(tmp_path):
    folder = write(tmp_path, files(case("pipe", [([0, 1], ["fast"]), ([2, 3], ["fast"])])))
    run = only(folder)
    # Up once; four times receive, F, B; three times the gradient holds the next F up; the last B of stage 0.
    pipeline_s = 1.1 + 4 * (MESSAGE_S + 1.5 + 3.0) + 3 * MESSAGE_S + MESSAGE_S + 2.0
    assert run.predicted_s == pytest.approx(pipeline_s + update_s(slice(2)))
    assert run.longest == "stage 1, fast"


def test_messages_that_fit_the_transports_buffers_do_not_keep_their_sender(tmp_path):
    four = [([layer, layer], ["fast"]) for layer in range(4)]
    held, free = (
        only(write(tmp_path / name, files(case("pipe", four))), buffer_bytes=size)
        for name, size in (("held", 0.0), ("free", 1e6))
    )
    assert held.predicted_s > free.predicted_s
    assert free.time_parts.send_s == 0.0


def test_the_host_launches_anew_after_each_message(tmp_path):
    folder = write(tmp_path, files(case("pipe", [([0, 1], ["fast"]), ([2, 3], ["fast"])])))
    held, waits = only(folder), only(folder, relaunched_layers=0.5)
    # For each micro-batch that the last stage receives; those of the first stage hide behind it.
    assert 4 * 0.5 * FORWARD_S[1] - 1e-9 <= waits.predicted_s - held.predicted_s <= 5 * 0.5 * FORWARD_S[1] + 1e-9


def test_pipelines_that_are_alike_do_the_same(tmp_path):
    two = [([0, 1], ["fast", "fast"]), ([2, 3], ["fast", "fast"])]
    one = [([0, 1], ["fast"]), ([2, 3], ["fast"])]
    more = only(write(tmp_path / "two", files(case("two", two))))
    less = only(write(tmp_path / "one", files(case("one", one))))
    assert more.predicted_s - more.time_parts.gradient_sum_s == pytest.approx(less.predicted_s)
    assert more.predicted_bytes == less.predicted_bytes


def test_a_first_stage_holds_as_many_micro_batches_as_there_are_stages_but_not_more_than_there_are(tmp_path):
    stages = [([0, 1], ["fast"]), ([2, 3], ["fast"])]
    many = only(write(tmp_path / "many", files(case("many", stages))))
    few = only(write(tmp_path / "few", files(case("few", stages, global_batch=2))))
    assert many.byte_parts.activation_bytes == 2 * 2 * 4 * (8 + 50)
    assert few.byte_parts.activation_bytes <= 2 * 4 * (50 + 30)


def test_a_head_that_was_not_profiled_is_estimated(tmp_path):
    def without_head(content):
        sizes = content["profiles_toy.json"]["memory_by_tp"]["1"]
        sizes["params_floats"] = [*PARAMETERS[:3], 8]

    plan = case("one", [(ALL, ["fast"])])
    known = only(write(tmp_path / "known", files(plan)))
    missing = only(write(tmp_path / "missing", files(plan), without_head))
    assert (known.estimated_head, missing.estimated_head) == (False, True)
    # At the rate of the model's own block, since no other model of the folder shows what a head costs.
    flop = 2 * SEQUENCE * HIDDEN * WORDS / (SEQUENCE * (24 * HIDDEN**2 + 4 * SEQUENCE * HIDDEN))
    assert missing.time_parts.compute_s - known.time_parts.compute_s == pytest.approx(4 * (1.0 + 2.0) * flop)
    # Two tensors of logits are kept; the embedding's words are the projection's, less what the profile had.
    logits = 2 * 4 * 2 * WORDS * SEQUENCE
    assert missing.byte_parts.activation_bytes - known.byte_parts.activation_bytes == logits
    assert missing.byte_parts.state_bytes - known.byte_parts.state_bytes == 24 * (WORDS * HIDDEN + 8 - 48)


def test_a_small_micro_batch_shows_only_part_of_the_launches(tmp_path):
    def slow_launches(content):
        table = content["profiles_toy.json"]["timing_by_gpu"]["fast"]["simulator"]
        table["4"] = {"1": {key: [1.0 * value for value in values] for key, values in table["2"]["1"].items()}}

    folder = write(tmp_path, files(case("one", [(ALL, ["fast"])])), slow_launches)
    # A micro-batch of four takes as long as one of two, so half of the two's time is waiting for launches.
    shown, half = only(folder), only(folder, launch_exposure=0.5)
    assert half.time_parts.compute_s == pytest.approx(0.75 * shown.time_parts.compute_s)


def test_flagged_figures_count_in_no_error(tmp_path):
    content = files(
        case("right", [(ALL, ["fast"])]),
        case("small", [(ALL, ["fast"])], flags=["suspect memory: too small"], measured_peak_memory_bytes=1),
        case("copy", [(ALL, ["fast"])], flags=["suspect: a copy"], measured_iteration_s=1.0),
    )
    found = validate_reference(write(tmp_path, content), platform=PLAIN).sets["made-up"]
    right, small, copy = found.cases
    assert (right.excluded, small.excluded, copy.excluded) == ((), ("memory",), ("time", "memory"))
    assert found.time_mape == found.time_max_ape == pytest.approx(abs(right.time_error_ratio))
    assert found.memory_max_ape == pytest.approx(abs(right.memory_error_ratio))


def test_a_set_whose_figures_are_all_flagged_has_no_errors(tmp_path):
    folder = write(tmp_path, files(case("copy", [(ALL, ["fast"])], flags=["invalid: other layers"])))
    found = validate_reference(folder, platform=PLAIN).sets["made-up"]
    assert (found.time_mape, found.time_max_ape, found.memory_mape, found.memory_max_ape) == (None,) * 4


@pytest.mark.parametrize(
    ("flag", "figures"),
    [
        ("red_grads 1.0 is a copy; do not use red_grads", ()),
        ("suspect time: another run", ("time",)),
        ("something that nobody has said before", ("time", "memory")),
    ],
)
def test_flags_say_what_to_leave_out(flag, figures):
    assert excluded_figures((flag,)) == figures


def test_progress_is_told_for_every_run(tmp_path):
    told = []
    folder = write(tmp_path, files(case("a", [(ALL, ["fast"])]), case("b", [(ALL, ["slow"])])))
    validate_reference(folder, platform=PLAIN, progress=lambda done, total, name: told.append((done, total, name)))
    assert told == [(0, 2, "a"), (1, 2, "b")]


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no measured runs beside the repository: ../shared/reference")
def test_measured_runs_are_predicted_within_sane_bounds():
    """The figures themselves are in docs/simulator.md; this only notices when something breaks."""
    found = validate_reference(REFERENCE)
    assert found.sets
    for of_set in found.sets.values():
        for error in (of_set.time_mape, of_set.memory_mape):
            assert error is None or error < 0.15
        for run in of_set.cases:
            parts, sizes = run.time_parts, run.byte_parts
            seconds = (parts.compute_s, parts.receive_s, parts.send_s, parts.gradient_sum_s, parts.update_s)
            assert min(seconds) >= -1e-9
            assert parts.wait_s + sum(seconds) == pytest.approx(run.predicted_s)
            held = (sizes.state_bytes, sizes.activation_bytes, sizes.message_bytes, sizes.workspace_bytes)
            assert sum(held) + sizes.base_bytes == pytest.approx(run.predicted_bytes)
