"""Who reads each row through a convolution window: the tables that its backward gathers by.

Shape suffixes: C compact rows, W taps, E shared rows, U their users.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from harts.backends.placing import place


class SharedRows(NamedTuple):
    """Rows that are context of another sequence, with all that read them; all tensors are int64.

    Every other row is read by itself and the rows right after it in its sequence, which needs no table.
    """

    row: Tensor
    """Ascending, [E]."""
    offset: Tensor
    """Users of row e are entries offset[e]:offset[e + 1], by tap, then by row, [E + 1]."""
    user: Tensor
    """A row whose window holds the shared row, [U]."""
    tap: Tensor
    """The tap over the shared row in that window, [U]."""


def shared_rows(row_WC: Tensor, cu_rows: list[int], device: torch.device | str = "cpu") -> SharedRows:
    """Invert a window table for the rows that several sequences read.

    Where sequences lie does not matter, though one may lie right behind its context: which rows are shared, and in what
    order their gradients are summed, is the same whatever else is packed.

    Args:
        row_WC: int64 row under each tap, oldest first; C stands for no row; on the host, [W, C].
        cu_rows: sequence i is rows cu_rows[i]:cu_rows[i + 1], [Q + 1].
        device: where the tables go.
    """
    rows = row_WC.shape[1]
    sequence_C = torch.searchsorted(torch.tensor(cu_rows[1:]), torch.arange(rows), right=True)
    sequence_of = pad(sequence_C, (0, 1), value=-1)
    shared = torch.zeros(rows + 1, dtype=torch.bool)
    shared[row_WC[sequence_of[row_WC] != sequence_C]] = True
    shared[rows] = False
    tap, user = shared[row_WC].nonzero(as_tuple=True)
    read, order = row_WC[tap, user].sort(stable=True)
    row, count = torch.unique_consecutive(read, return_counts=True)
    tables = row, pad(count.cumsum(0), (1, 0)), user[order], tap[order]
    return SharedRows(*(place(each, device) for each in tables))
