"""Brings results of gathered rows to the rows that they belong to, in a fixed order."""

from __future__ import annotations

import triton
from torch import Tensor

from harts.backends.linear.tree.row_kernels import settle_rows_kernel

BLOCK = 1024
"""Channels of a row that one program handles."""


def settle_rows(body: Tensor, head: Tensor, *where: Tensor) -> None:
    """Change rows of `body` [R, ...] in place by rows of `head` [X, ...]; `where` are the columns of a `Settlement`."""
    size = body[0].numel()
    grid = (len(where[0]) * triton.cdiv(size, BLOCK),)
    if grid[0]:
        settle_rows_kernel[grid](body, head, *where, SIZE=size, BLOCK=BLOCK)
