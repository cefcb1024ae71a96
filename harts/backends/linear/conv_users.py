"""Who reads each row through a convolution window: the tables that its backward gathers by.

Shape suffixes: C compact rows, W taps, E shared rows, U their users.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class SharedRows(NamedTuple):
    """Rows in the context of a sequence that does not follow them in compact order, with all that read them.

    Every other row is read only by the rows right after it, which needs no table. All tensors are int64.
    """

    row: Tensor
    """Ascending, [E]."""
    offset: Tensor
    """Users of row e are entries offset[e]:offset[e + 1], by tap, then by row, [E + 1]."""
    user: Tensor
    """A row whose window holds the shared row, [U]."""
    tap: Tensor
    """The tap over the shared row in that window, [U]."""


def shared_rows(row_WC: Tensor) -> SharedRows:
    """Invert a window table where it is no plain shift.

    Args:
        row_WC: int64 row under each tap, oldest first; C stands for no row, [W, C].

    Returns:
        Tables on the same device. Users of a row are in an order that rows of other trees do not change.
    """
    width, rows = row_WC.shape
    compact = torch.arange(rows, device=row_WC.device)
    distance = torch.arange(width - 1, -1, -1, device=row_WC.device)
    shared = torch.zeros(rows + 1, dtype=torch.bool, device=row_WC.device)
    shared[row_WC[row_WC + distance[:, None] != compact]] = True
    shared[rows] = False
    tap, user = shared[row_WC].nonzero(as_tuple=True)
    read, order = row_WC[tap, user].sort(stable=True)
    row, count = torch.unique_consecutive(read, return_counts=True)
    return SharedRows(row, pad(count.cumsum(0), (1, 0)), user[order], tap[order])
