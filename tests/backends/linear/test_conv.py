from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from harts.backends.linear.conv import short_conv
from harts.ir import CompactLayout
from tests.backends.linear.calls import error, weighted_sum
from tests.backends.linear.trees import (
    DEEP,
    layout_of,
    plan_of,
    random_layout,
    semantic_rows,
    trajectory_offsets,
    without_context,
)
from tests.forests import paths_of

D = 3


def leaves(layout: CompactLayout, width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(len(layout.input_ids), D, generator=draw, dtype=torch.float64)
    weight = torch.randn(D, width, generator=draw, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def trajectory_wise(x: Tensor, weight: Tensor, layout: CompactLayout) -> Tensor:
    """torch's own convolution over each trajectory alone, [S, D]."""
    bounds, rows = trajectory_offsets(layout), semantic_rows(layout)
    width = weight.shape[1]
    found = []
    for begin, end in pairwise(bounds):
        padded = torch.nn.functional.pad(x[rows[begin:end]].T, (width - 1, 0))
        found.append(silu(conv1d(padded, weight[:, None], groups=D)).T)
    return torch.cat(found)


def errors(layout: CompactLayout, used: CompactLayout, width: int) -> tuple[float, float, float]:
    """Relative errors of outputs, gradient of x and gradient of the weight, with the tables of `used`."""
    x, weight = leaves(layout, width)
    wanted = trajectory_wise(x, weight, layout)
    found = short_conv(x, weight, plan_of(used))[semantic_rows(layout)]
    before = torch.autograd.grad(weighted_sum([wanted]), (x, weight))
    after = torch.autograd.grad(weighted_sum([found]), (x, weight))
    return error(found, wanted), error(after[0], before[0]), error(after[1], before[1])


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_convolution_of_each_trajectory(seed: int) -> None:
    width = seed % 4 + 1
    layout = random_layout(seed, width)
    assert max(errors(layout, layout, width)) < 1e-13


def test_windows_reach_over_one_token_segments_to_position_zero() -> None:
    layout = layout_of(paths_of([(-1, 1), (0, 1), (0, 1), (1, 1), (1, 1), (3, 1), (3, 2), (5, 1), (5, 1)]))
    assert max(errors(layout, layout, 4)) < 1e-13


def test_skipping_the_context_is_noticed() -> None:
    layout = layout_of(DEEP)
    assert min(errors(layout, without_context(layout), 4)) > 1e-3


def test_hand_written_gradients() -> None:
    layout = layout_of(DEEP)
    plan = plan_of(layout)
    assert torch.autograd.gradcheck(lambda x, weight: short_conv(x, weight, plan), leaves(layout, 4))


def test_poison_on_padding_rows_leaks_nowhere() -> None:
    layout = layout_of(DEEP, row_multiple=32)
    x, weight = leaves(layout, 4)
    wanted = short_conv(x, weight, plan_of(layout))
    with torch.no_grad():
        x[layout.rows :] = torch.nan
    found = short_conv(x, weight, plan_of(layout))
    assert torch.equal(found, wanted)
    assert not found[layout.rows :].any()
    dx, dweight = torch.autograd.grad(weighted_sum([found]), (x, weight))
    assert dx.isfinite().all()
    assert dweight.isfinite().all()
    assert not dx[layout.rows :].any()


def test_narrow_inputs_are_rounded_once() -> None:
    layout = layout_of(DEEP)
    x, weight = leaves(layout, 4, torch.bfloat16)
    found = short_conv(x, weight, plan_of(layout))
    wide = short_conv(x.detach().float(), weight.detach().float(), plan_of(layout))
    assert torch.equal(found, wide.bfloat16())


def test_a_weight_of_another_width_is_refused() -> None:
    layout = layout_of(DEEP)
    x, weight = leaves(layout, 3)
    with pytest.raises(ValueError, match=r"weight: has shape \(3, 3\), needed is \(3, 4\)"):
        short_conv(x, weight, plan_of(layout))
    with pytest.raises(ValueError, match="x: has 4 rows"):
        short_conv(x[:4], leaves(layout, 4)[1], plan_of(layout))
