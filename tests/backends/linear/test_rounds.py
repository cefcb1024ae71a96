from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.base import LinearAttention, RoundOutput
from harts.backends.linear.naive import Naive
from harts.backends.plan_tensors import PlanTensors
from harts.ir import CompactLayout
from tests.backends.linear.calls import RULES, error, naive, random_rows, recurrent, weighted_sum, worst
from tests.backends.linear.trees import DEEP, layout_of, plan_of, random_layout, semantic_rows, trajectory_wise


class StatesWithoutGradient(Naive):
    def call(self, *args: Any) -> RoundOutput:
        output, states = super().call(*args)
        return RoundOutput(output, states.detach())


class ZeroStates(Naive):
    def call(self, *args: Any) -> RoundOutput:
        output, states = super().call(*args)
        return RoundOutput(output, torch.zeros_like(states))


class GarbageReplayQueries(Naive):
    """Rounds come in the plan's order: each call overwrites q of the rows that its round does not own."""

    def __init__(self, plan: PlanTensors) -> None:
        super().__init__(Naive.Config())
        self.owned = iter([each.own for each in plan.rounds])

    def call(self, rows: dict[str, Tensor], *call: Any) -> RoundOutput:
        replayed = torch.ones(len(rows["q"]), 1, 1, dtype=torch.bool)
        replayed[next(self.owned)] = False
        return super().call({**rows, "q": rows["q"].masked_fill(replayed, 1e6)}, *call)


def gradients(loss: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))


def errors(backend: LinearAttention, layout: CompactLayout, rule: str, oracle: LinearAttention) -> tuple[float, float]:
    """Relative errors of outputs and gradients against the trajectory-wise run."""
    inputs = random_rows(len(layout.input_ids), rule)
    wanted = trajectory_wise(oracle, inputs, layout)
    found = backend.mix(inputs, plan_of(layout))[semantic_rows(layout)]
    of_gradients = worst(gradients(weighted_sum([found]), inputs), gradients(weighted_sum([wanted]), inputs))
    return error(found, wanted), of_gradients


@pytest.mark.parametrize("seed", range(20))
def test_rounds_equal_trajectory_wise_runs(seed: int) -> None:
    rule = RULES[seed % 2]
    assert max(errors(naive(), random_layout(seed), rule, naive())) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_rounds_of_the_recurrence_equal_the_recurrence_of_trajectories(rule: str) -> None:
    assert max(errors(recurrent(), layout_of(DEEP), rule, recurrent())) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_chunkwise_rounds_equal_the_recurrence_of_trajectories(rule: str) -> None:
    layout = layout_of(DEEP)
    assert layout.plan.rounds >= 3
    assert max(errors(naive(), layout, rule, recurrent())) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_dropping_the_gradient_of_states_is_noticed(rule: str) -> None:
    outputs, of_gradients = errors(StatesWithoutGradient(Naive.Config()), layout_of(DEEP), rule, naive())
    assert outputs < 1e-12
    assert of_gradients > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_zero_instead_of_a_boundary_state_is_noticed(rule: str) -> None:
    assert min(errors(ZeroStates(Naive.Config()), layout_of(DEEP), rule, naive())) > 1e-3


def test_queries_of_replay_rows_influence_no_bit() -> None:
    layout = layout_of(DEEP)
    plan, inputs = plan_of(layout), random_rows(len(layout.input_ids), "kda")
    assert len(layout.replay_row) > 0
    wanted, found = naive().mix(inputs, plan), GarbageReplayQueries(plan).mix(inputs, plan)
    assert torch.equal(found, wanted)
    before, after = gradients(weighted_sum([wanted]), inputs), gradients(weighted_sum([found]), inputs)
    assert all(torch.equal(after[name], before[name]) for name in inputs)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_poison_on_padding_rows_leaks_nowhere(name: str) -> None:
    layout = layout_of(DEEP, row_multiple=32)
    assert len(layout.input_ids) > layout.rows
    plan, inputs = plan_of(layout), random_rows(len(layout.input_ids), "kda")
    wanted = naive().mix(inputs, plan)
    with torch.no_grad():
        inputs[name][layout.rows :] = torch.nan
    found = naive().mix(inputs, plan)
    assert torch.equal(found, wanted)
    assert not found[layout.rows :].any()
    for gradient in gradients(weighted_sum([found]), inputs).values():
        assert gradient.isfinite().all()
        assert not gradient[layout.rows :].any()


@pytest.mark.parametrize("seed", range(4))
def test_a_leaf_changes_no_bit_of_other_rows(seed: int) -> None:
    layout = random_layout(seed)
    tree = layout.plan.tree
    plan, inputs = plan_of(layout), random_rows(len(layout.input_ids), "kda", dtype=torch.float32)
    before = naive().mix(inputs, plan)
    leaf = next(v for v in range(len(tree.parent)) if v not in tree.parent)
    mine = torch.zeros(len(before), dtype=torch.bool)
    mine[layout.segment_row[leaf] : layout.segment_row[leaf] + tree.length[leaf]] = True
    with torch.no_grad():
        for x in inputs.values():
            x[mine] *= 0.5
    after = naive().mix(inputs, plan)
    assert torch.equal(after[~mine], before[~mine])
    assert not torch.equal(after[mine], before[mine])


def test_narrow_inputs_hand_over_float32_states() -> None:
    layout = layout_of(DEEP)
    inputs = random_rows(len(layout.input_ids), "kda", dtype=torch.bfloat16)
    found = naive().mix(inputs, plan_of(layout))
    assert found.dtype == torch.bfloat16
    wide = {name: x.detach().double() for name, x in inputs.items()}
    assert error(found.double(), naive().mix(wide, plan_of(layout))) < 2**-8


def test_inputs_must_be_the_backends() -> None:
    layout = layout_of(DEEP)
    inputs = random_rows(len(layout.input_ids), "kda")
    beta = inputs.pop("beta")
    with pytest.raises(ValueError, match="got g, k, q, v; needed are q, k, v, g, beta"):
        naive().mix(inputs, plan_of(layout))
    with pytest.raises(ValueError, match=r"beta: has \d+ rows, the plan has \d+"):
        naive().mix({**inputs, "beta": beta[1:]}, plan_of(layout))
