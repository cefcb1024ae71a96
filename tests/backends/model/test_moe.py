import math

import pytest
import torch

from harts.backends.model.config import MoeConfig
from harts.backends.model.mlp import Experts, Mlp
from harts.backends.model.moe import move_bias, route, statistics
from harts.backends.model.parameters import Draw, initialise
from harts.errors import BackendError
from tests.backends.model.cases import FORK, MOE, compact_layout, config, execute, reference

NO_BIAS = torch.zeros(4, dtype=torch.float64)


def moe(**changes: object) -> MoeConfig:
    return MoeConfig(**({"experts": 4, "top_k": 2, "intermediate_size": 3} | changes))  # type: ignore[arg-type]


def logits(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_weights_are_the_scores_of_the_chosen_over_their_sum(scoring: str) -> None:
    found = route(torch.tensor([[0.3, -1.0, 2.0, 0.5]], dtype=torch.float64), NO_BIAS, moe(scoring=scoring))
    assert found.chosen.tolist() == [[2, 3]]
    best, second = (math.exp(x) if scoring == "softmax" else 1 / (1 + math.exp(-x)) for x in (2.0, 0.5))
    wanted = [0.0, 0.0, best / (best + second), second / (best + second)]
    torch.testing.assert_close(found.weight[0].tolist(), wanted, rtol=1e-14, atol=0)


def test_equal_scores_go_to_the_lower_experts() -> None:
    assert route(torch.zeros(3, 4, dtype=torch.float64), NO_BIAS, moe()).chosen.tolist() == [[0, 1]] * 3


def test_bias_selects_but_does_not_weigh() -> None:
    row = torch.tensor([[0.3, -1.0, 2.0, 0.5]], dtype=torch.float64)
    bias = torch.tensor([0, 9, 0, 0], dtype=torch.float64)
    found = route(row, bias, moe(scoring="sigmoid"))
    assert found.chosen.tolist() == [[1, 2]]
    score = row.sigmoid()[0]
    assert float(found.weight[0, 1]) == pytest.approx(float(score[1] / (score[1] + score[2])), rel=1e-14)
    assert torch.equal(found.probability, score[None] / score.sum())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_statistics_are_those_of_the_rows_written_out(scoring: str) -> None:
    multiplicity = [3, 1, 2, 5, 1, 0]
    found = statistics(*_routed(logits(), scoring), torch.tensor(multiplicity, dtype=torch.float64))
    repeated = logits().repeat_interleave(torch.tensor(multiplicity), dim=0)
    load, mass, z = [0.0] * 4, [0.0] * 4, 0.0
    for row in repeated.tolist():
        scores = [math.exp(x) if scoring == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
        z += math.log(sum(math.exp(x) for x in row)) ** 2
        for expert in sorted(range(4), key=lambda e: -scores[e])[:2]:
            load[expert] += 1
        for expert in range(4):
            mass[expert] += scores[expert] / sum(scores)
    semantic = sum(multiplicity)
    assert found.load.tolist() == load
    assert float(found.z) == pytest.approx(z, rel=1e-13)
    balance = 4 * sum(a / (2 * semantic) * b / semantic for a, b in zip(load, mass, strict=True))
    assert float(found.balance) == pytest.approx(balance, rel=1e-13)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_autocast_changes_no_statistic(scoring: str) -> None:
    values = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
    multiplicity = torch.arange(600) % 7 + 1.0
    wanted = statistics(*_routed(values, scoring), multiplicity)
    with torch.autocast("cpu", torch.bfloat16):
        found = statistics(*_routed(values, scoring), multiplicity)
    assert wanted.load.sum() == 2 * multiplicity.sum()
    for got, each in zip(found, wanted, strict=True):
        assert got.dtype == each.dtype == torch.float32
        assert torch.equal(got, each)


def _routed(values: torch.Tensor, scoring: str):  # type: ignore[no-untyped-def]
    return values, route(values, NO_BIAS, moe(scoring=scoring))


def test_experts_side_by_side_equal_experts_one_by_one() -> None:
    experts = Experts(5, 3, 4, torch.float64)
    initialise(experts, Draw(0, 0.5))
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = route(logits(), NO_BIAS, moe()).weight
    wanted = torch.zeros_like(x)
    for index in range(4):
        units = slice(3 * index, 3 * index + 3)
        one = Mlp(5, 3, torch.float64)
        for name in ("gate", "up"):
            getattr(one, name).weight = torch.nn.Parameter(getattr(experts, name).weight[units])
        one.down.weight = torch.nn.Parameter(experts.down.weight[:, units])
        wanted += weight[:, index : index + 1] * one(x)
    torch.testing.assert_close(experts(x, weight), wanted, rtol=1e-13, atol=1e-14)


def test_experts_that_nobody_chose_have_zero_gradients() -> None:
    model = reference(config(layers=1, moe={**MOE, "top_k": 1}))
    layer = model.module.moe_layers[0]
    layer.expert_bias += torch.tensor([0, 0, 9, 0, 0])
    found = execute(model, compact_layout(FORK)).gradients["blocks.0.moe.experts.gate.weight"].reshape(5, 6, 16)
    assert [bool(each.any()) for each in found] == [False, False, True, False, False]


def test_expert_bias_moves_against_the_load_of_the_step() -> None:
    model = reference(config(layers=2, moe={**MOE, "expert_bias_rate": 0.25}))
    load = torch.tensor([[3, 1, 0, 4, 2], [0, 0, 0, 0, 10]], dtype=torch.float64)
    model.update_expert_bias(load)
    found = [layer.expert_bias.tolist() for layer in model.module.moe_layers]
    assert found == [[-0.25, 0.25, 0.25, -0.25, 0.0], [0.25, 0.25, 0.25, 0.25, -0.25]]
    model.update_expert_bias(load)
    assert model.module.moe_layers[1].expert_bias.tolist() == [0.5, 0.5, 0.5, 0.5, -0.5]


def test_a_bias_in_which_steps_are_rounded_away_is_refused() -> None:
    bias = torch.full((4,), 0.5, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match=r"steps of 0\.001 are rounded away in a selection bias of torch\.bfloat16"):
        move_bias(bias, torch.arange(4.0), 0.001)
    assert bias.tolist() == [0.5] * 4


def test_load_of_another_shape_is_refused() -> None:
    model = reference(config(layers=2, moe=MOE))
    with pytest.raises(BackendError, match=r"shape \(1, 5\).*\(2, 5\)"):
        model.update_expert_bias(torch.ones(1, 5))


def test_load_has_no_gradient() -> None:
    load = execute(reference(config(moe=MOE)), compact_layout(FORK)).output.expert_load
    assert load is not None
    assert not load.requires_grad
