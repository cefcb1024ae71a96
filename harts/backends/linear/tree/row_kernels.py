"""Triton kernel that brings results of head rows to the compact rows that they belong to."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _settle(body, head, row, own, offset, source, i, block, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    wide: tl.constexpr = tl.float64 if head.dtype.element_ty == tl.float64 else tl.float32
    o_d = block * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < SIZE
    p_body = body + tl.load(row + i) * SIZE + o_d
    owner = tl.load(own + i)
    b_sum = tl.load(head + owner * SIZE + o_d, mask=m_d & (owner >= 0), other=0.0).to(wide)
    b_sum += tl.load(p_body, mask=m_d & (owner < 0), other=0.0).to(wide)
    for j in range(tl.load(offset + i), tl.load(offset + i + 1)):
        b_sum += tl.load(head + tl.load(source + j) * SIZE + o_d, mask=m_d, other=0.0).to(wide)
    tl.store(p_body, b_sum.to(body.dtype.element_ty), mask=m_d)


@triton.jit
def settle_rows_kernel(
    body_0, head_0, body_1, head_1, body_2, head_2, body_3, head_3, body_4, head_4, row, own, offset, source,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr, SIZE_4: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """body[r] = (head[own] if r is owned by a head row, else body[r]) + sum of head[s] over its replays, in order.

    Of up to five pairs of tensors, SIZE channels a row (0: no such pair). Sums are float32, or float64 of float64 rows,
    and rounded to the body's dtype at the end. One program a row and block of channels; each row is listed once.
    """
    end_0: tl.constexpr = (SIZE_0 + BLOCK - 1) // BLOCK
    end_1: tl.constexpr = end_0 + (SIZE_1 + BLOCK - 1) // BLOCK
    end_2: tl.constexpr = end_1 + (SIZE_2 + BLOCK - 1) // BLOCK
    end_3: tl.constexpr = end_2 + (SIZE_3 + BLOCK - 1) // BLOCK
    end_4: tl.constexpr = end_3 + (SIZE_4 + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    i, block = program // end_4, program % end_4
    if block < end_0:
        _settle(body_0, head_0, row, own, offset, source, i, block, SIZE_0, BLOCK)
    elif block < end_1:
        _settle(body_1, head_1, row, own, offset, source, i, block - end_0, SIZE_1, BLOCK)
    elif block < end_2:
        _settle(body_2, head_2, row, own, offset, source, i, block - end_1, SIZE_2, BLOCK)
    elif block < end_3:
        _settle(body_3, head_3, row, own, offset, source, i, block - end_2, SIZE_3, BLOCK)
    else:
        _settle(body_4, head_4, row, own, offset, source, i, block - end_3, SIZE_4, BLOCK)
