"""Compact execution equals trajectory-wise execution: everything a step gives, in float64, over random forests."""

import pytest

from tests.parity.cases import Case, cases
from tests.parity.rig import faults, layouts_of, runs

CASES = cases(240)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_steps_equal_trajectory_wise_training(case: Case):
    # on every other pass through the models the trajectory-wise side is the token recurrence, which knows no chunks
    linear = "recurrent" if case.number // 24 % 2 else "naive"
    compact = runs(case, layouts_of(case, "min_call"))
    flat = runs(case, layouts_of(case, "flat"), linear)
    for step, (ours, theirs) in enumerate(zip(compact, flat, strict=True)):
        assert not faults(ours, theirs, 1e-10), f"step {step}"
    assert len(ours.result.logprobs) == len(case.batch().tokens) - len(case.batch().columns)


@pytest.mark.parametrize("call_plan", ["per_segment", "no_replay"])
@pytest.mark.parametrize("case", CASES[:48:5], ids=str)
def test_ablation_plans_are_exact_in_exact_arithmetic(case: Case, call_plan: str):
    ours, theirs = next(runs(case, layouts_of(case, call_plan))), next(runs(case, layouts_of(case, "flat")))
    assert not faults(ours, theirs, 1e-10)


@pytest.mark.parametrize("case", CASES[:48:7], ids=str)
def test_padding_rows_change_nothing(case: Case):
    ours = next(runs(case, layouts_of(case, "min_call", row_multiple=64)))
    theirs = next(runs(case, layouts_of(case, "min_call")))
    assert not faults(ours, theirs, 1e-12)
