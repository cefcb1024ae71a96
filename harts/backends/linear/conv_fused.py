"""The short convolution by Triton kernels, with gradients that are the same bits in every run.

Shape suffixes: R compact rows (C tokens, then padding), D channels, W taps; N blocks of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from harts.backends.linear.sizes import ceil_div
from harts.backends.plan_tensors import PlanTensors


class Blocks(NamedTuple):
    """What one program of a kernel works on at a time."""

    rows: int
    channels: int
    num_warps: int

    def programs(self, row_blocks: int, channels: int) -> tuple[int]:
        """The grid of a launch."""
        return (row_blocks * ceil_div(channels, self.channels),)

    def constants(self) -> dict[str, int]:
        """Arguments that kernels are compiled for."""
        return {"BLOCK_B": self.rows, "BLOCK_K": self.channels, "num_warps": self.num_warps}


# Among the fastest of some fifty each on an H200: bfloat16, [65536, 6144], four taps. Fixed, since how rows are summed
# shows in the bits of gradients. Summing rows within one warp takes half the time that it takes across four.
FORWARD = Blocks(32, 128, 4)
BACKWARD_MIXED = Blocks(32, 32, 1)
BACKWARD_ROWS = Blocks(64, 64, 4)
BACKWARD_SHARED = Blocks(32, 128, 4)


def fused_conv(x: Tensor, weight: Tensor, plan: PlanTensors) -> Tensor:
    """`short_conv` by kernels: x [R, D] and weight [D, W], both of at most 32 bits, on the device of the plan.

    Only x and weight are kept for backward. Gradients are summed in a fixed order: equal bits in every run.
    """
    fused: Tensor = _FusedConv.apply(x, weight, plan)  # type: ignore[no-untyped-call]
    return fused


class _FusedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_DW: Tensor, plan: PlanTensors) -> Tensor:
        x_RD = _adjacent_channels(x_RD)
        ctx.save_for_backward(x_RD, weight_DW)
        ctx.plan = plan
        with torch.cuda.device_of(x_RD):  # type: ignore[no-untyped-call]
            return _forward(x_RD, weight_DW.T.contiguous(), plan.conv_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RD, weight_DW = ctx.saved_tensors
        plan: PlanTensors = ctx.plan
        users = plan.once("conv_shared_rows", lambda: shared_rows(plan.window, plan.cu_rows, plan.device))
        with torch.cuda.device_of(x_RD):  # type: ignore[no-untyped-call]
            weight_WD = weight_DW.T.contiguous()
            dz_CD, dweight_WD = _backward_mixed(x_RD, weight_WD, plan.conv_row, _adjacent_channels(dy_RD))
            return _backward_rows(dz_CD, weight_WD, plan.conv_row, users, x_RD), dweight_WD.T, None


def _adjacent_channels(x_RD: Tensor) -> Tensor:
    """Rows may have any stride; the channels of a row lie side by side."""
    return x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()


def _forward(x_RD: Tensor, weight_WD: Tensor, row_WC: Tensor) -> Tensor:
    (total, channels), (width, rows) = x_RD.shape, row_WC.shape
    y_RD = x_RD.new_empty(total, channels)
    grid = FORWARD.programs(ceil_div(total, FORWARD.rows), channels)
    forward_kernel[grid](
        x_RD, weight_WD, row_WC, y_RD, rows, total, channels, x_RD.stride(0), W=width, **FORWARD.constants()
    )
    return y_RD


def _backward_mixed(x_RD: Tensor, weight_WD: Tensor, row_WC: Tensor, dy_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of what SiLU is applied to, float32 [C, D], and of the weight, [W, D]."""
    channels, (width, rows) = x_RD.shape[1], row_WC.shape
    row_blocks = ceil_div(rows, BACKWARD_MIXED.rows)
    dz_CD = x_RD.new_empty(rows, channels, dtype=torch.float32)
    part_NWD = x_RD.new_empty(row_blocks, width, channels, dtype=torch.float32)
    strides = x_RD.stride(0), dy_RD.stride(0)
    grid, constants = BACKWARD_MIXED.programs(row_blocks, channels), BACKWARD_MIXED.constants()
    backward_mixed_kernel[grid](
        x_RD, weight_WD, row_WC, dy_RD, dz_CD, part_NWD, rows, channels, *strides, W=width, **constants
    )
    return dz_CD, part_NWD.sum(0).to(weight_WD.dtype)


def _backward_rows(dz_CD: Tensor, weight_WD: Tensor, row_WC: Tensor, shared: SharedRows, x_RD: Tensor) -> Tensor:
    """Gradient of the input [R, D]: every row as if only the rows after it read it, then the shared rows again."""
    (total, channels), (width, rows) = x_RD.shape, row_WC.shape
    dx_RD = x_RD.new_empty(total, channels)
    grid = BACKWARD_ROWS.programs(ceil_div(total, BACKWARD_ROWS.rows), channels)
    backward_rows_kernel[grid](
        dz_CD, weight_WD, row_WC, dx_RD, rows, total, channels, W=width, **BACKWARD_ROWS.constants()
    )
    if len(shared.row):
        grid = BACKWARD_SHARED.programs(len(shared.row), channels)
        backward_shared_kernel[grid](dz_CD, weight_WD, *shared, dx_RD, channels, **BACKWARD_SHARED.constants())
    return dx_RD
