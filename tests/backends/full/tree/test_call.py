"""The whole backend, over what the library computes in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.backends.full.sdpa import Sdpa
from harts.backends.full.tree.backend import Tree
from harts.backends.plan_tensors import AttentionViews
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, Branches, views_of
from tests.backends.full.packed_fakes import SHAPES, draw
from tests.backends.full.tree.library import put_in_place

FORESTS: dict[str, Branches] = {
    "three levels": THREE_LEVELS,
    "tiles": [(-1, 1000), (999, 129), (5, 1), (500, 70), (1000, 100), (-1, 40), (1199, 1), (-1, 9)],
    "several roots": [(-1, 5), (-1, 230), (-1, 1), (134, 40), (3, 2)],
    "one row": [(-1, 1), (0, 140), (3, 2)],
    "roots alone": [(-1, 5), (-1, 130)],
    "two roots": [(-1, 50), (-1, 7), (49, 300), (20, 140)],
}
TREE, SCALE = FORESTS["several roots"], 0.3


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch)


def attend(q: Tensor, k: Tensor, v: Tensor, views: AttentionViews) -> Tensor:
    return Tree(StageConfig()).attend(q, k, v, views, SCALE)


def oracle(q: Tensor, k: Tensor, v: Tensor, views: AttentionViews) -> Tensor:
    return Sdpa(StageConfig()).attend(q, k, v, views, SCALE)


def run(function: Any, inputs: list[Tensor], views: AttentionViews) -> list[Tensor]:
    """Outputs and all gradients."""
    out = function(*inputs, views)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def assert_equals_the_oracle(inputs: list[Tensor], views: AttentionViews) -> None:
    torch.testing.assert_close(run(attend, inputs, views), run(oracle, inputs, views), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("branches", FORESTS.values(), ids=FORESTS)
def test_equals_the_oracle(branches: Branches, shape: tuple[int, int, int, int], padding: int) -> None:
    views = views_of(branches, padding)
    assert_equals_the_oracle(draw(views.rows, shape), views)


def test_padding_rows_reach_nothing() -> None:
    inputs, views = draw(283, SHAPES["mla"]), views_of(TREE, 5)
    with torch.no_grad():
        for each in inputs:
            each[278:] = torch.nan
    for each in run(attend, inputs, views):
        assert each[:278].isfinite().all()
        assert not each[278:].any()


def test_inputs_and_upstream_gradients_may_have_strides() -> None:
    views, fused = views_of(TREE, 3), draw(281, (6, 1, 16, 8))[0]
    (of_fused,) = torch.autograd.grad(attend(*fused.split(2, dim=1), views).sum(), fused)
    (wanted,) = torch.autograd.grad(oracle(*fused.split(2, dim=1), views).sum(), fused)
    torch.testing.assert_close(of_fused, wanted, rtol=1e-11, atol=1e-12)
    given = [each.detach().transpose(1, 2).contiguous().transpose(1, 2) for each in draw(281, SHAPES["gqa"])]
    assert_equals_the_oracle([each.requires_grad_() for each in given], views)


def test_recomputation_gives_the_same() -> None:
    inputs, views = draw(278, SHAPES["gqa"]), views_of(TREE)
    found = run(lambda *given: checkpoint(attend, *given, use_reentrant=False), inputs, views)
    for one, other in zip(found, run(attend, inputs, views), strict=True):
        assert torch.equal(one, other)
