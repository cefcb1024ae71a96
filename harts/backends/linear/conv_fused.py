"""The short convolution by Triton kernels, with gradients that are the same bits in every run.

Shape suffixes: R compact rows (C tokens, then padding), D channels, W taps; N blocks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.backends.linear.conv_kernels import (
    backward_mixed_kernel,
    backward_rows_kernel,
    backward_shared_kernel,
    forward_kernel,
)
from harts.backends.linear.conv_users import SharedRows, shared_rows
from harts.backends.plan_tensors import PlanTensors

BLOCK_ROWS = 32
BLOCK_CHANNELS = 128
BLOCK_USERS = 32
NUM_WARPS = 4


def fused_conv(x: Tensor, weight: Tensor, plan: PlanTensors) -> Tensor:
    """`short_conv` by kernels: x [R, D] and weight [D, W], both of at most 32 bits, on the device of the plan.

    Only x and weight are kept for backward. Gradients are summed in a fixed order: equal bits in every run.
    """
    fused: Tensor = _FusedConv.apply(x, weight, plan)  # type: ignore[no-untyped-call]
    return fused


class _FusedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_DW: Tensor, plan: PlanTensors) -> Tensor:
        x_RD, weight_DW = _adjacent_channels(x_RD), weight_DW.contiguous()
        ctx.save_for_backward(x_RD, weight_DW)
        ctx.plan = plan
        with torch.cuda.device_of(x_RD):  # type: ignore[no-untyped-call]
            return _forward(x_RD, weight_DW, plan.conv_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RD, weight_DW = ctx.saved_tensors
        plan: PlanTensors = ctx.plan
        users = plan.once("conv_shared_rows", lambda: shared_rows(plan.conv_row))
        with torch.cuda.device_of(x_RD):  # type: ignore[no-untyped-call]
            dz_CD, dweight_DW = _backward_mixed(x_RD, weight_DW, plan.conv_row, _adjacent_channels(dy_RD))
            return _backward_rows(dz_CD, weight_DW, plan.conv_row, users, x_RD), dweight_DW, None


def _adjacent_channels(x_RD: Tensor) -> Tensor:
    """Rows may have any stride; the channels of a row lie side by side."""
    return x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _programs(blocks: int, channels: int) -> tuple[int]:
    return (blocks * _ceil_div(channels, BLOCK_CHANNELS),)


def _forward(x_RD: Tensor, weight_DW: Tensor, row_WC: Tensor) -> Tensor:
    (total, channels), (width, rows) = x_RD.shape, row_WC.shape
    y_RD = x_RD.new_empty(total, channels)
    forward_kernel[_programs(_ceil_div(total, BLOCK_ROWS), channels)](
        x_RD,
        weight_DW,
        row_WC,
        y_RD,
        rows,
        total,
        channels,
        x_RD.stride(0),
        W=width,
        BLOCK_B=BLOCK_ROWS,
        BLOCK_K=BLOCK_CHANNELS,
        num_warps=NUM_WARPS,
    )
    return y_RD


def _backward_mixed(x_RD: Tensor, weight_DW: Tensor, row_WC: Tensor, dy_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of what SiLU is applied to, float32 [C, D], and of the weight, which sums over blocks of rows."""
    channels, (width, rows) = x_RD.shape[1], row_WC.shape
    blocks = _ceil_div(rows, BLOCK_ROWS)
    dz_CD = x_RD.new_empty(rows, channels, dtype=torch.float32)
    part_NWD = x_RD.new_empty(blocks, width, channels, dtype=torch.float32)
    backward_mixed_kernel[_programs(blocks, channels)](
        x_RD,
        weight_DW,
        row_WC,
        dy_RD,
        dz_CD,
        part_NWD,
        rows,
        channels,
        x_RD.stride(0),
        dy_RD.stride(0),
        W=width,
        BLOCK_B=BLOCK_ROWS,
        BLOCK_K=BLOCK_CHANNELS,
        num_warps=NUM_WARPS,
    )
    return dz_CD, part_NWD.sum(0).T.to(weight_DW.dtype)


def _backward_rows(dz_CD: Tensor, weight_DW: Tensor, row_WC: Tensor, shared: SharedRows, x_RD: Tensor) -> Tensor:
    """Gradient of the input [R, D]: every row as if only the rows after it read it, then the shared rows again."""
    (total, channels), (width, rows) = x_RD.shape, row_WC.shape
    dx_RD = x_RD.new_empty(total, channels)
    backward_rows_kernel[_programs(_ceil_div(total, BLOCK_ROWS), channels)](
        dz_CD,
        weight_DW,
        row_WC,
        dx_RD,
        rows,
        total,
        channels,
        W=width,
        BLOCK_B=BLOCK_ROWS,
        BLOCK_K=BLOCK_CHANNELS,
        num_warps=NUM_WARPS,
    )
    if len(shared.row):
        backward_shared_kernel[_programs(len(shared.row), channels)](
            dz_CD,
            weight_DW,
            *shared,
            dx_RD,
            channels,
            W=width,
            BLOCK_U=BLOCK_USERS,
            BLOCK_K=BLOCK_CHANNELS,
            num_warps=NUM_WARPS,
        )
    return dx_RD
