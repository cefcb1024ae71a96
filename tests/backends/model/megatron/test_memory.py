"""Microbatches leave nothing behind in a model of Megatron."""

from __future__ import annotations

import gc

import pytest
from torch import Tensor

from tests.backends.model.held import held_after_a_pass
from tests.backends.model.megatron.runs import MOE, compact, forest, tensors, tiny


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_pass_is_not_held(recompute: str, balanced: bool) -> None:
    model = tiny(recompute=recompute, moe=MOE)
    assert not held_after_a_pass(model, lambda seed: tensors(compact(forest(seed))), balanced=balanced)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_row_of_the_last_pass_is_held(recompute: str) -> None:
    model = tiny(recompute=recompute, moe=MOE)
    plan = tensors(compact(forest(1)))
    model.forward(plan).hidden.square().sum().backward()
    gc.collect()
    shape = (len(plan.input_ids), 1, model.config.hidden_size)
    assert not [each for each in gc.get_objects() if isinstance(each, Tensor) and each.shape == shape]
