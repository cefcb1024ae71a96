"""Rows of a microbatch shared out over processes, and log-probs brought together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from harts.ir.base import Int64


def own_positions(row: Int64, process: int, processes: int) -> Int64:
    """Positions whose rows are this process's: contiguous shares of the rows that predict something.

    Shares differ by one row at most, as the LM head's work is by rows; a share may be empty.

    Args:
        row: compact row that predicts each of M positions.
        process: number of this process.
        processes: how many share the work.

    Returns:
        Indices into the M positions, increasing.
    """
    used = np.flatnonzero(np.bincount(row))
    first, end = (len(used) * each // processes for each in (process, process + 1))
    if first == end:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero((row >= used[first]) & (row <= used[end - 1])).astype(np.int64)


def exchange(own: Tensor, members: Int64, count: int, group: ProcessGroup) -> Tensor:
    """Bring the values of all processes together in one collective; all of them get equal bits.

    Backward has none: the loss is computed alike by all processes, each hands on the gradient of its own values.

    Args:
        own: values of this process's positions, float32 or wider, [k, m].
        members: which positions these are, [m]; of no other process.
        count: all positions, M.
        group: processes that have all positions together.

    Returns:
        [k, M].
    """
    index = torch.from_numpy(members).to(own.device)
    return _Exchange.apply(own, index, count, group)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, index: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        values = own.new_zeros(len(own), count).index_copy(1, index, own)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_values: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return d_values[:, index], None, None, None
