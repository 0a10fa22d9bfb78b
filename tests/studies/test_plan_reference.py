"""Plans for other frameworks on a made-up folder of figures: they fit, use what is there, and none is missed."""

from itertools import combinations, product

import pytest

from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.planner.request import Constraints, Objective
from spantrain.planner.strategies.pools.costs import PoolPlan, PoolReplica, PoolStage
from spantrain_studies.reference.folder import read_reference
from spantrain_studies.reference.plan import ReferencePlanner
from testing.reference import PLAIN, case, files, write

LAYERS = 4
BATCH = 16
PRICES = {
    "gpu_usd_per_hour_simulator": {"fast": {"here": 3600.0}, "slow": {"here": 1200.0}},
    "transfer_usd_per_gb": {"here": {"here": 0.0}},
    "memory_model": {
        "bytes_per_parameter": {"adam": 24},
        "constant_bytes_when_planning": {"tp1": 1000.0, "tp>1": 2000.0},
    },
}


def reference(folder, memory=10**9):
    def change(content):
        content["prices.json"] |= PRICES
        for row in content["prices.json"]["cluster"].values():
            if isinstance(row, dict):
                row["mem_per_gpu"] = memory

    return read_reference(write(folder, files(case("one", [([0, 3], ["fast"])])), change))


def planner(found, fast, slow):
    available = {("fast", "here"): fast, ("slow", "here"): slow}
    return ReferencePlanner(found, PLAIN, model="toy", global_batch=BATCH, available=available)


def all_plans(counts):
    """Every plan of whole stages of one kind on so many devices of each kind."""
    for stages in range(1, LAYERS + 1):
        for kinds in product(range(len(counts)), repeat=stages):
            most = min(counts[kind] // kinds.count(kind) for kind in set(kinds))
            for width, size in product(range(1, most + 1), (1, 2)):
                for cuts in combinations(range(1, LAYERS), stages - 1):
                    begins = (0, *cuts)
                    yield PoolPlan(
                        micro_batch=size,
                        micro_batches=-(-BATCH // (size * width)),
                        stages=tuple(
                            PoolStage(units=range(i, j), runs=((PoolReplica(kind, 1), width),))
                            for kind, i, j in zip(kinds, begins, (*begins[1:], LAYERS), strict=True)
                        ),
                    )


@pytest.mark.parametrize(("fast", "slow"), [(1, 1), (2, 1), (2, 3)])
def test_no_plan_of_whole_stages_is_better(tmp_path, fast, slow):
    found = planner(reference(tmp_path), fast, slow)
    ours = found.plan()
    every = [found.figures(plan) for plan in all_plans((fast, slow))]
    assert ours.valid
    assert ours.step_s <= min(row.step_s for row in every if row.valid) * (1 + 1e-9)


def test_no_plan_of_whole_stages_is_cheaper(tmp_path):
    found = planner(reference(tmp_path), 2, 2)
    every = [figures for figures in map(found.figures, all_plans((2, 2))) if figures.valid]
    bound_s = sorted(row.step_s for row in every)[len(every) // 2]
    ours = found.plan(Objective.COST, Constraints(max_step_s=bound_s))
    assert ours.step_s <= bound_s
    assert ours.usd_per_step <= min(row.usd_per_step for row in every if row.step_s <= bound_s) * (1 + 1e-9)


def test_memory_is_kept_to_by_both_counts(tmp_path):
    """A device that cannot hold the whole model gets a part of it; one that can hold no layer gets none."""
    whole = planner(reference(tmp_path / "large"), 2, 0).plan()
    tight = planner(reference(tmp_path / "small", memory=8000), 2, 0).plan()
    assert len(whole.plan.stages) == 1
    assert len(tight.plan.stages) == 2
    assert tight.valid
    assert tight.peak_bytes <= 8000
    assert max(tight.counted_bytes) <= 8000
    with pytest.raises(InfeasiblePlanError, match="nothing fits into memory"):
        planner(reference(tmp_path / "none", memory=2000), 2, 2).plan()


def test_a_rival_s_plan_is_judged_by_what_is_there(tmp_path):
    found = planner(reference(tmp_path), 1, 1)
    stage = PoolStage(units=range(LAYERS), runs=((PoolReplica(0, 1), 2),))
    figures = found.figures(PoolPlan(micro_batch=1, micro_batches=8, stages=(stage,)))
    assert figures.over_available == ("fast in here",)
    assert not figures.valid


def test_what_the_folder_does_not_have_is_told(tmp_path):
    known = reference(tmp_path)
    with pytest.raises(PlanError, match="no model 'none'; it has toy"):
        ReferencePlanner(known, PLAIN, model="none", global_batch=1, available={("fast", "here"): 1})
    with pytest.raises(PlanError, match=r"prices\.json knows fast, slow"):
        ReferencePlanner(known, PLAIN, model="toy", global_batch=1, available={("other", "here"): 1})
    with pytest.raises(PlanError, match="must not be negative"):
        ReferencePlanner(known, PLAIN, model="toy", global_batch=1, available={("fast", "here"): -1})
    bare = read_reference(write(tmp_path / "bare", files(case("one", [([0, 3], ["fast"])]))))
    with pytest.raises(PlanError, match="needs prices"):
        planner(bare, 1, 0)
