"""Triton kernel that brings results of head rows to the compact rows that they belong to."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def settle_rows_kernel(body, head, row, own, offset, source, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """body[r] = (head[own] if r is owned by a head row, else body[r]) + sum of head[s] over its replays, in order.

    Sums are float32, or float64 of float64 rows, and rounded once. One program a row and block of channels; each
    row is listed once.
    """
    wide: tl.constexpr = tl.float64 if head.dtype.element_ty == tl.float64 else tl.float32
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    i = program // blocks
    o_d = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < SIZE
    p_body = body + tl.load(row + i) * SIZE + o_d
    owner = tl.load(own + i)
    b_sum = tl.load(head + owner * SIZE + o_d, mask=m_d & (owner >= 0), other=0.0).to(wide)
    b_sum += tl.load(p_body, mask=m_d & (owner < 0), other=0.0).to(wide)
    for j in range(tl.load(offset + i), tl.load(offset + i + 1)):
        b_sum += tl.load(head + tl.load(source + j) * SIZE + o_d, mask=m_d, other=0.0).to(wide)
    tl.store(p_body, b_sum.to(body.dtype.element_ty), mask=m_d)
