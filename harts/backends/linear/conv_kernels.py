"""Triton kernels of the short convolution: one launch forward, three backward, none with atomics.

A program holds a block of rows times a block of channels; the grid has one axis, channel blocks fastest. Every element
is computed alike wherever it lies in a block, in float32, so that the bits of a row depend on its window alone. Row
offsets are int64: rows times channels can pass 2^31. Numbers of rows are not specialised: any number runs the same
binary.

Shape suffixes: R compact rows (C tokens, then padding), D channels, W taps, E shared rows, U their users; B rows and
K channels of a block.
"""
# Triton's language is not typed, and kernels take the arrays that they take:
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(channels, BLOCK_K: tl.constexpr):
    """Index of the row block (int64) and the channels of this program."""
    across = tl.cdiv(channels, BLOCK_K)
    program = tl.program_id(0)
    return (program // across).to(tl.int64), program % across * BLOCK_K + tl.arange(0, BLOCK_K)


@triton.jit
def _under_tap(x, row_WC, tap: tl.constexpr, row_B, channel_K, rows, channels, x_stride):
    """Float32 values under one tap; zero where the window begins before position 0, and on padding rows."""
    at_B = row_WC + tap * rows.to(tl.int64) + row_B
    source_B = tl.load(at_B, mask=row_B < rows, other=rows)
    within = (source_B < rows)[:, None] & (channel_K < channels)[None, :]
    return tl.load(x + source_B[:, None] * x_stride + channel_K[None, :], mask=within, other=0.0).to(tl.float32)


@triton.jit
def _tap_weight(weight_WD, tap: tl.constexpr, channel_K, channels):
    return tl.load(weight_WD + tap * channels + channel_K, mask=channel_K < channels, other=0.0).to(tl.float32)


@triton.jit
def _mixed(
    x, weight_WD, row_WC, row_B, channel_K, rows, channels, x_stride,
    W: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum over the taps, oldest first."""
    z_BK = tl.zeros((BLOCK_B, BLOCK_K), tl.float32)
    for tap in tl.static_range(W):
        x_BK = _under_tap(x, row_WC, tap, row_B, channel_K, rows, channels, x_stride)
        z_BK += x_BK * _tap_weight(weight_WD, tap, channel_K, channels)[None, :]
    return z_BK


@triton.jit(do_not_specialize=["rows", "total"])
def forward_kernel(
    x, weight_WD, row_WC, y_RD, rows, total, channels, x_stride,
    W: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = silu(sum over taps of weight * row under the tap), in y's dtype; zeros on padding rows."""
    block, channel_K = _block(channels, BLOCK_K)
    row_B = block * BLOCK_B + tl.arange(0, BLOCK_B)
    z_BK = _mixed(x, weight_WD, row_WC, row_B, channel_K, rows, channels, x_stride, W, BLOCK_B, BLOCK_K)
    y_BK = z_BK * tl.sigmoid(z_BK)
    inside = (row_B < total)[:, None] & (channel_K < channels)[None, :]
    tl.store(y_RD + row_B[:, None] * channels + channel_K[None, :], y_BK.to(y_RD.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward_mixed_kernel(
    x, weight_WD, row_WC, dy, dz_CD, part_NWD, rows, channels, x_stride, dy_stride,
    W: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Float32 gradient of the sum over taps, and of the weight from the rows of this block alone."""
    block, channel_K = _block(channels, BLOCK_K)
    row_B = block * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = (row_B < rows)[:, None] & (channel_K < channels)[None, :]
    z_BK = _mixed(x, weight_WD, row_WC, row_B, channel_K, rows, channels, x_stride, W, BLOCK_B, BLOCK_K)
    gate_BK = tl.sigmoid(z_BK)
    dy_BK = tl.load(dy + row_B[:, None] * dy_stride + channel_K[None, :], mask=inside, other=0.0).to(tl.float32)
    dz_BK = dy_BK * gate_BK * (1.0 + z_BK * (1.0 - gate_BK))
    tl.store(dz_CD + row_B[:, None] * channels + channel_K[None, :], dz_BK, mask=inside)
    for tap in tl.static_range(W):
        x_BK = _under_tap(x, row_WC, tap, row_B, channel_K, rows, channels, x_stride)
        at_K = part_NWD + (block * W + tap) * channels + channel_K
        tl.store(at_K, tl.sum(x_BK * dz_BK, 0), mask=channel_K < channels)


@triton.jit(do_not_specialize=["rows", "total"])
def backward_rows_kernel(
    dz_CD, weight_WD, row_WC, dx_RD, rows, total, channels,
    W: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of each row from its own and those of the rows right after it that read it; zeros on padding rows."""
    block, channel_K = _block(channels, BLOCK_K)
    row_B = block * BLOCK_B + tl.arange(0, BLOCK_B)
    dx_BK = tl.zeros((BLOCK_B, BLOCK_K), tl.float32)
    for tap in tl.static_range(W):
        user_B = row_B + (W - 1 - tap)
        read_B = tl.load(row_WC + tap * rows.to(tl.int64) + user_B, mask=user_B < rows, other=-1)
        reads = (read_B == row_B)[:, None] & (channel_K < channels)[None, :]
        dz_BK = tl.load(dz_CD + user_B[:, None] * channels + channel_K[None, :], mask=reads, other=0.0)
        dx_BK += dz_BK * _tap_weight(weight_WD, tap, channel_K, channels)[None, :]
    inside = (row_B < total)[:, None] & (channel_K < channels)[None, :]
    tl.store(dx_RD + row_B[:, None] * channels + channel_K[None, :], dx_BK.to(dx_RD.dtype.element_ty), mask=inside)


@triton.jit
def backward_shared_kernel(
    dz_CD, weight_WD, shared_E, offset_E, user_U, tap_U, dx_RD, channels,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of one shared row from all its users, in the order of the table; one row block is one shared row."""
    shared, channel_K = _block(channels, BLOCK_K)
    end = tl.load(offset_E + shared + 1)
    dx_K = tl.zeros((BLOCK_K,), tl.float32)
    for begin in range(tl.load(offset_E + shared), end, BLOCK_B):
        entry_B = begin + tl.arange(0, BLOCK_B)
        listed = entry_B < end
        user_B1 = tl.load(user_U + entry_B, mask=listed, other=0)[:, None]
        tap_B1 = tl.load(tap_U + entry_B, mask=listed, other=0)[:, None]
        inside = listed[:, None] & (channel_K < channels)[None, :]
        dz_BK = tl.load(dz_CD + user_B1 * channels + channel_K[None, :], mask=inside, other=0.0)
        weight_BK = tl.load(weight_WD + tap_B1 * channels + channel_K[None, :], mask=inside, other=0.0).to(tl.float32)
        dx_K += tl.sum(dz_BK * weight_BK, 0)
    at_K = dx_RD + tl.load(shared_E + shared) * channels + channel_K
    tl.store(at_K, dx_K.to(dx_RD.dtype.element_ty), mask=channel_K < channels)
