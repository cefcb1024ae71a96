"""Brings results of gathered rows to the rows that they belong to, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from harts.backends.linear.sizes import ceil_div
from harts.backends.linear.tree.row_kernels import settle_rows_kernel

BLOCK = 1024
"""Channels of a row that one program handles."""
PAIRS = 5
"""Pairs of one launch."""


def settle_rows(bodies: Sequence[Tensor], heads: Sequence[Tensor], *where: Tensor) -> None:
    """Change rows of each body [R, ...] in place by rows of its head [X, ...], all in one launch.

    Args:
        bodies: up to five contiguous tensors.
        heads: as many, contiguous.
        where: the columns of a `Settlement`.
    """
    spare = PAIRS - len(bodies)
    sizes = [body[0].numel() for body in bodies]
    programs = len(where[0]) * sum(ceil_div(size, BLOCK) for size in sizes)
    if programs:
        pairs = [x for pair in zip(bodies, heads, strict=True) for x in pair] + [bodies[0], heads[0]] * spare
        settle_rows_kernel[(programs,)](*pairs, *where, *sizes, *[0] * spare, BLOCK=BLOCK)
