"""Short causal convolution over compact rows: every window sees true ancestors only.

Shape suffixes: R compact rows (C tokens, then padding), D channels, W taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu

from harts.backends.linear.dtypes import wide_dtype
from harts.backends.plan_tensors import PlanTensors


def short_conv(x: Tensor, weight: Tensor, plan: PlanTensors) -> Tensor:
    """Depthwise causal convolution and SiLU, once per compact row; zero before position 0.

    Args:
        x: [R, D].
        weight: taps of each channel, oldest first, [D, W].
        plan: the microbatch; its layout was made for this W.

    Returns:
        [R, D] in the dtype of x, computed in float32 or wider; zeros on padding rows. Gradients of what a window saw
        flow to the ancestors' rows.

    Raises:
        ValueError: W or R is not the plan's.
    """
    width = len(plan.conv_row)
    if weight.shape != (x.shape[1], width):
        raise ValueError(f"weight: has shape {tuple(weight.shape)}, needed is ({x.shape[1]}, {width})")
    if len(x) != len(plan.input_ids):
        raise ValueError(f"x: has {len(x)} rows, the plan has {len(plan.input_ids)}")
    dtype = wide_dtype(x, weight)
    if x.is_cuda and dtype == torch.float32:
        from harts.backends.linear.conv_fused import fused_conv  # noqa: PLC0415  (needs triton)

        return fused_conv(x, weight, plan)
    mixed: Tensor = _GatheredConv.apply(x[: plan.rows].to(dtype), weight.to(dtype), plan.conv_row)  # type: ignore[no-untyped-call]
    return pad(silu(mixed).to(x.dtype), (0, 0, 0, len(x) - plan.rows))


class _GatheredConv(torch.autograd.Function):
    """y_c = sum over taps of w_tap * x[row under the tap]; backward gathers again instead of keeping W copies of x."""

    @staticmethod
    def forward(ctx: Any, x_CD: Tensor, weight_DW: Tensor, row_WC: Tensor) -> Tensor:
        ctx.save_for_backward(x_CD, weight_DW, row_WC)
        padded, y_CD = _with_zero_row(x_CD), torch.zeros_like(x_CD)
        for y, rows in _blocks(y_CD, row_WC):
            for row, tap_D in zip(rows, weight_DW.T, strict=True):
                y.addcmul_(padded.index_select(0, row), tap_D)
        return y_CD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_CD, weight_DW, row_WC = ctx.saved_tensors
        padded, dweight_WD = _with_zero_row(x_CD), torch.zeros_like(weight_DW.T)
        dpadded = torch.zeros_like(padded)
        for dy, rows in _blocks(grads[0], row_WC):
            for row, tap_D, dtap_D in zip(rows, weight_DW.T, dweight_WD, strict=True):
                dtap_D.add_((padded.index_select(0, row) * dy).sum(0))
                dpadded.index_add_(0, row, dy * tap_D)
        return dpadded[:-1], dweight_WD.T, None


def _blocks(x_CD: Tensor, row_WC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows with their taps, few at a time: gathered copies that stay in cache are several times faster to use."""
    for begin in range(0, len(x_CD), 2048):
        yield x_CD[begin : begin + 2048], row_WC[:, begin : begin + 2048]


def _with_zero_row(x_CD: Tensor) -> Tensor:
    return pad(x_CD, (0, 0, 0, 1))
