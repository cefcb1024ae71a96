"""The order in which `tree` has FlashAttention 4 run its lists changes no bit, against the library's own order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.full import flash_attention_4
from harts.backends.full.packed import import_faults
from harts.backends.full.tree.plan import TreePlan, tile_sizes, tree_plan
from tests.backends.full.forests import THREE_LEVELS, Branches, views_of

pytestmark = pytest.mark.gpu

HEAD_DIMS = [(64, 64), (128, 128), (192, 128)]
FORESTS: dict[str, Branches] = {
    "three levels": [*THREE_LEVELS, (-1, 261)],
    "long": [(-1, 2000), (1999, 700), (1999, 900), (1500, 130), (2699, 64), (-1, 300)],
    "whole tiles": [(-1, 1024), (1023, 512), (1023, 512), (1535, 384)],
}


def gradients(kernel: Any, given: list[Tensor], plan: TreePlan) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    *inputs, upstream = given
    inputs = [each.detach().requires_grad_() for each in inputs]
    out = kernel.run(*inputs, plan, 0.1)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize("branches", FORESTS.values(), ids=FORESTS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_the_order_of_the_library_gives_equal_bits(
    head_dims: tuple[int, int], branches: Branches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for gradients of queries, which tiles add to in any order."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if reasons := import_faults(flash_attention_4.MODULE, "fa4"):
        pytest.skip(reasons[0])
    from harts.backends.full.tree import kernel
    from tests.backends.full.tree.same_mask import sees_as_before

    views = views_of(branches, 0, "cuda")
    sizes = tile_sizes(head_dims)
    assert sizes is not None
    plan = tree_plan(views, sizes)
    generator = torch.Generator().manual_seed(views.rows)
    dims = (head_dims[0], head_dims[0], head_dims[1], head_dims[1])
    given = [torch.randn(views.rows, 4, dim, generator=generator).to("cuda", torch.bfloat16) for dim in dims]
    found = gradients(kernel, given, plan)
    monkeypatch.setattr(kernel, "sees", sees_as_before)
    monkeypatch.setattr(kernel, "longest_first", nullcontext)
    wanted = gradients(kernel, given, plan)
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        if name == "dq":
            assert (one.double() - other.double()).norm() < 1e-3 * other.double().norm()
        else:
            assert torch.equal(one, other), name
        assert other.abs().max() > 0
