"""Microbatches leave nothing behind in a model of transformers."""

from __future__ import annotations

import pytest

from tests.backends.model.held import held_after_a_pass
from tests.backends.model.huggingface.models import CHUNK, FAMILIES, tiny
from tests.backends.model.huggingface.runs import forest, tensors
from tests.parity.trees import layout_of


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_is_not_held(family: str, recompute: str, balanced: bool) -> None:
    model = tiny(family, recompute=recompute)
    assert not held_after_a_pass(model, lambda seed: tensors(layout_of(forest(seed), CHUNK)), balanced=balanced)
