"""Gradients lie row by row, as the rows do: products with columns of some other number of rows are slow on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from tests.backends.model.huggingface.models import CHUNK, FAMILIES, tiny
from tests.backends.model.huggingface.runs import compact, forest
from tests.parity.trees import layout_of


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_projections_lie_row_by_row(family: str) -> None:
    model = tiny(family)
    strides: dict[str, tuple[int, ...]] = {}
    for name, each in model.module.model.layers.named_modules():
        if isinstance(each, nn.Linear):
            each.register_forward_hook(_listener(strides, name))
    found = compact(model, layout_of(forest(0), CHUNK))
    found.loss.backward()
    assert len(strides) >= 4 * len(model.module.model.layers)
    assert {name: each for name, each in strides.items() if each[-1] != 1} == {}


def _listener(strides: dict[str, tuple[int, ...]], name: str) -> Callable[..., None]:
    def hook(_module: nn.Module, _given: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: strides.__setitem__(name, gradient.stride()))

    return hook
