"""Launches of the kernels that expand rows and sum the gradients of their copies; for `expand`.

Shape suffixes: R compact rows, n expanded rows, G heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from harts.backends.full.expand import Copies
from harts.backends.full.expand_kernels import gather_rows_kernel, sum_copies_kernel
from harts.backends.linear.sizes import ceil_div, power_of_two

BLOCK = 1024
"""Channels of a row that one program handles, at most."""
ROWS = 4
"""Rows that one program copies."""
CHANNELS = 256
"""Channels of one warp: 16 bytes a thread in 16 bits."""
AHEAD = 4
"""Copies whose loads are under way at a time."""


def gather_rows(x: Tensor, row: Tensor) -> Tensor:
    """Copy rows.

    Args:
        x: [R, G, D]; rows and heads may have any strides.
        row: row of x, int64, [n].

    Returns:
        [n, G, D], contiguous.
    """
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty(len(row), *x.shape[1:])
    size = x.shape[1] * x.shape[2]
    block = min(BLOCK, power_of_two(size))
    programs = ceil_div(len(row), ROWS) * ceil_div(size, block)
    gather_rows_kernel[(programs,)](
        x, row, out, len(row), x.stride(0), x.stride(1), DIM=x.shape[2], SIZE=size, ROWS=ROWS, BLOCK=block
    )
    return out


def sum_copies(copies: Tensor, where: Copies) -> Tensor:
    """Sum over the copies of each row, in float32 or wider and in order.

    Args:
        copies: [n, G, D], contiguous.
        where: where the copies of R rows are.

    Returns:
        [R, G, D] in the dtype of `copies`; zeros for rows that have no copy.
    """
    rows, size = len(where.interval), copies[0].numel()
    out = copies.new_empty(rows, *copies.shape[1:])
    block = min(BLOCK, power_of_two(size))
    warps = max(1, block // CHANNELS)
    programs = rows * ceil_div(size, block)
    sum_copies_kernel[(programs,)](copies, *where, out, SIZE=size, BLOCK=block, AHEAD=AHEAD, num_warps=warps)
    return out
