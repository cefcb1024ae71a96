"""Triton kernels that copy compact rows to all branches that see them, and sum the gradients of those copies."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_rows_kernel(
    x, row, out, total, stride_row, stride_head,
    DIM: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = x[row[i]] for `total` rows of SIZE channels in heads of DIM.

    Rows of `out` are contiguous; rows and heads of x have strides. One program for ROWS rows and a block of channels.
    """
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    o_r = program // blocks * ROWS + tl.arange(0, ROWS)
    o_d = program % blocks * BLOCK + tl.arange(0, BLOCK)
    m_r = o_r < total
    m_x = m_r[:, None] & (o_d < SIZE)[None, :]
    b_row = tl.load(row + o_r, mask=m_r, other=0)
    o_x = o_d // DIM * stride_head + o_d % DIM
    b_x = tl.load(x + b_row[:, None] * stride_row + o_x[None, :], mask=m_x)
    tl.store(out + o_r[:, None] * SIZE + o_d[None, :], b_x, mask=m_x)


@triton.jit
def sum_copies_kernel(
    copies, interval, offset, base, out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out[r] = sum of copies[base[j] + r] over j of the interval of r, one after the other.

    Sums are float32, or float64 of float64 rows, and rounded at the end. One program a row and block of channels; the
    loads of AHEAD copies are under way at a time.
    """
    wide: tl.constexpr = tl.float64 if copies.dtype.element_ty == tl.float64 else tl.float32
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    r, block = program // blocks, program % blocks
    o_d = block * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < SIZE
    i = tl.load(interval + r)
    end = tl.load(offset + i + 1)
    b_sum = tl.zeros([BLOCK], dtype=wide)
    for j in range(tl.load(offset + i), end, AHEAD):
        for ahead in tl.static_range(AHEAD):
            there = j + ahead < end
            source = tl.load(base + j + ahead, mask=there, other=0) + r
            b_sum += tl.load(copies + source * SIZE + o_d, mask=m_d & there, other=0.0).to(wide)
    tl.store(out + r * SIZE + o_d, b_sum.to(out.dtype.element_ty), mask=m_d)
