"""The stage: labels at forks, last tokens, temperatures, and targets that the model does not have."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.split import Split
from harts.errors import BackendError, InputError
from harts.ir import CompactLayout, CompactOutputs, SemanticOutputs
from harts.stages.restore import labels
from harts.stages.restore.labels import predictions
from harts.stages.restore.mapped import Mapped
from tests.forests import random_trajectories, tree_of
from tests.stages.restore.layouts import layout_of

WIDTH, VOCABULARY = 6, 40
FORK = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 8]]


def restore(layout: CompactLayout, hidden: Any, weight: Tensor, **config: Any) -> SemanticOutputs:
    model = SimpleNamespace(head_weight=lambda: weight, vocabulary=len(weight), split=Split())
    env = SimpleNamespace(model=model, device="cpu", dtype=weight.dtype)
    return Mapped(Mapped.Config(**config), env).run(CompactOutputs(layout, hidden))


def random_inputs(layout: CompactLayout, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(layout.input_ids), WIDTH, generator=draw, dtype=torch.float64)
    return hidden, torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64)


def one_by_one(layout: CompactLayout, hidden: Tensor, weight: Tensor, trajectories: list[list[int]]) -> Tensor:
    """Log-probs of plain evaluation, one trajectory after the other."""
    offset, rows = layout.plan.tree.columns.offset, layout.semantic_map.rows()
    temperature = layout.plan.tree.columns.per_token("temperature")
    found = []
    for i, tokens in enumerate(trajectories):
        mine = rows[offset[i] : offset[i + 1]]
        for t in range(1, len(tokens)):
            heat = 1.0 if temperature is None else temperature[offset[i] + t]
            found.append(((hidden[mine[t - 1]] @ weight.T) / heat).log_softmax(0)[tokens[t]])
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def test_a_fork_reads_one_row_with_each_branchs_label() -> None:
    layout = layout_of(tree_of(FORK), order=[3, 2, 1, 0], padding=2)
    layout.semantic_map.verify()
    row, target, scale = predictions(layout, VOCABULARY)
    assert target.tolist() == [2, 3, 4, 2, 3, 5, 8]
    assert scale is None
    assert row[2] == row[5], "token 3 is one row"
    assert layout.input_ids[row].tolist() == [1, 2, 3, 1, 2, 3, 9]


def test_fork_values_are_those_of_each_trajectory() -> None:
    layout = layout_of(tree_of(FORK), order=[3, 1, 2, 0])
    hidden, weight = random_inputs(layout)
    out = restore(layout, hidden, weight)
    out.verify()
    assert len(out.logprobs) == 3 + 3 + 1
    torch.testing.assert_close(out.logprobs, one_by_one(layout, hidden, weight, FORK), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_equal_plain_evaluation(seed: int) -> None:
    rng = random.Random(seed)
    trajectories = [*random_trajectories(rng, chunk=4), [7]]
    heat = np.array([rng.choice((0.6, 1.0, 1.3)) for _ in trajectories])
    tree = tree_of(trajectories, temperature=heat)
    order = list(range(len(tree.parent)))
    rng.shuffle(order)
    layout = layout_of(tree, order, padding=3)
    hidden, weight = random_inputs(layout, seed)
    out = restore(layout, hidden, weight, rows_per_block=3)
    torch.testing.assert_close(out.logprobs, one_by_one(layout, hidden, weight, trajectories), rtol=1e-12, atol=1e-12)


def test_reading_the_physical_neighbour_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(tree_of(FORK))
    hidden, weight = random_inputs(layout)
    want = one_by_one(layout, hidden, weight, FORK)
    real = labels.predictions

    def shifted(layout: CompactLayout, vocabulary: int) -> labels.Predictions:
        row, _, scale = real(layout, vocabulary)
        return labels.Predictions(row, np.roll(layout.input_ids, -1)[row].astype(np.int64), scale)

    monkeypatch.setattr("harts.stages.restore.mapped.predictions", shifted)
    far = (restore(layout, hidden, weight).logprobs - want).abs()
    assert far.max() > 0.1


def test_only_one_token_trajectories_predict_nothing() -> None:
    layout = layout_of(tree_of([[3], [5], [3]]))
    hidden, weight = random_inputs(layout)
    out = restore(layout, hidden, weight, entropy=True)
    out.verify()
    assert out.logprobs.shape == out.entropy.shape == (0,)


def test_entropy_is_given_only_when_asked_for() -> None:
    layout = layout_of(tree_of(FORK))
    hidden, weight = random_inputs(layout)
    assert restore(layout, hidden, weight).entropy is None
    assert restore(layout, hidden, weight, entropy=True).entropy.shape == (7,)


def test_a_token_is_scaled_by_its_own_temperature() -> None:
    heat = np.array([9.0, 1.0, 2.0, 0.5, 9.0, 1.0, 2.0, 0.25, 9.0, 4.0])
    layout = layout_of(tree_of(FORK, temperatures=heat))
    scale = predictions(layout, VOCABULARY).inverse_temperature
    assert scale is not None
    assert scale.tolist() == [1.0, 0.5, 2.0, 1.0, 0.5, 4.0, 0.25]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_no_temperature_is_refused(bad: float) -> None:
    layout = layout_of(tree_of(FORK, temperature=np.array([1.0, bad, 1.0])))
    with pytest.raises(InputError, match=r"trajectory 't1', token 1: temperature is"):
        predictions(layout, VOCABULARY)


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    layout = layout_of(tree_of(FORK))
    with pytest.raises(BackendError, match=r"trajectory 't2', token 1: id 8 is outside the model's vocabulary of 8"):
        predictions(layout, 8)


def test_a_first_token_outside_the_vocabulary_is_no_target() -> None:
    assert predictions(layout_of(tree_of(FORK)), 9).target.max() == 8


def test_outputs_that_were_read_from_a_dump_are_restored_alike() -> None:
    layout = layout_of(tree_of(FORK))
    hidden, weight = random_inputs(layout)
    dumped = hidden.numpy().copy()
    dumped.flags.writeable = False
    assert torch.equal(restore(layout, dumped, weight).logprobs, restore(layout, hidden, weight).logprobs)


@pytest.mark.parametrize("entropy", [False, True])
def test_positions_that_are_not_trained_are_nan_and_cost_no_logits(entropy: bool) -> None:
    layout = layout_of(tree_of(FORK, loss_mask=np.array([0, 0, 0, 1, 0, 0, 1, 1, 0, 0], dtype=np.bool_)))
    hidden, weight = random_inputs(layout)
    columns = layout.plan.tree.columns
    trained = columns.loss_mask[columns.predicted()]
    assert 0 < trained.sum() < len(trained)
    hidden[predictions(layout, VOCABULARY).row[~trained]] = torch.nan  # nobody reads them
    shared = predictions(layout, VOCABULARY).row[trained]
    hidden[shared] = random_inputs(layout)[0][shared]
    full = restore(layout, random_inputs(layout)[0], weight, entropy=entropy)
    some = restore(layout, hidden.requires_grad_(), weight, entropy=entropy, positions="trained")
    for all_of_them, each in ((full.logprobs, some.logprobs), (full.entropy, some.entropy))[: 1 + entropy]:
        is_trained = torch.from_numpy(trained)
        torch.testing.assert_close(each[is_trained], all_of_them[is_trained], rtol=1e-13, atol=0)
        assert each[~is_trained].isnan().all()
    (grad,) = torch.autograd.grad(some.logprobs[torch.from_numpy(trained)].sum(), hidden)
    assert grad[shared].abs().min() > 0
    assert grad.isfinite().all()
