"""Compact execution equals trajectory-wise execution: everything a step gives, in float64, over random forests."""

import pytest
import torch

from harts.train.step import run_step
from tests.parity.cases import Case, cases
from tests.parity.rig import TRAIN, build, env_of, faults, layouts_of, runs

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


def test_poison_in_padding_rows_reaches_nothing():
    case = CASES[3]  # experts and recomputation; no trajectory holds token 0, which is what padding rows look up
    assert 0 not in case.batch().tokens
    results = []
    for poison in (False, True):
        env = env_of(case, "naive")
        if poison:
            with torch.no_grad():
                env.model.module.embedding.weight[0] = torch.nan
        execute, restore = build("execute", "compact", env), build("restore", "mapped", env)
        layouts = layouts_of(case, "min_call", row_multiple=64)
        assert any(layout.rows < len(layout.input_ids) for layout in layouts.items)
        sft = build("objectives", "sft")
        result = run_step(layouts, execute, restore, sft, TRAIN)
        results.append((result, [each.grad for each in env.model.module.parameters()]))
    (clean, gradients), (poisoned, others) = results
    assert clean.loss == poisoned.loss
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
