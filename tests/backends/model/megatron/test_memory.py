"""Microbatches leave nothing behind in a model of Megatron."""

from __future__ import annotations

import pytest

from tests.backends.model.held import held_after_a_pass
from tests.backends.model.megatron.runs import MOE, compact, forest, tensors, tiny


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_pass_is_not_held(recompute: str, balanced: bool) -> None:
    model = tiny(recompute=recompute, moe=MOE)
    assert not held_after_a_pass(model, lambda seed: tensors(compact(forest(seed))), balanced=balanced)
