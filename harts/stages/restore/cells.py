"""Predictions grouped so that logits, softmax and target logit are each computed once for all that share them.

Positions with equal (row, temperature, target) share a cell, cells with equal (row, temperature) share a
distribution, distributions of a row share its logits. Sums over what shares something are over contiguous pieces
in one fixed order, and every scatter has unique indices: results do not depend on threads or atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.backends.placing import place
from harts.ir.base import Int64
from harts.stages.restore.blocks import Block, SortedCells, cut_blocks
from harts.stages.restore.labels import Predictions


@dataclass(frozen=True)
class Cells:
    """All groupings of M positions, on the device."""

    order: Tensor
    """Positions sorted by row, temperature and target, [M]."""
    cell_length: Tensor
    """Positions of each cell, [number of cells]."""
    distribution_length: Tensor
    """Positions of each distribution, [number of distributions]."""
    blocks: tuple[Block, ...]

    def spread(self, each: Tensor, length: Tensor) -> Tensor:
        """Give each position the value of its cell or distribution, [M]."""
        out = each.new_empty(len(self.order))
        out[self.order] = each.repeat_interleave(length, output_size=len(self.order))
        return out

    def collect(self, positions: Tensor, length: Tensor) -> Tensor:
        """Add up the positions of each cell or distribution."""
        if not len(length):
            return positions.new_zeros(0)
        return torch.segment_reduce(positions[self.order].contiguous(), "sum", lengths=length)

    def numbers(self) -> Tensor:
        """Number of each position's distribution, [M]."""
        length = self.distribution_length
        return self.spread(torch.arange(len(length), device=length.device), length)

    def first(self, positions: Tensor, length: Tensor) -> Tensor:
        """Give each cell or distribution the value of its first position; all of them have the same."""
        return positions[self.order[length.cumsum(0) - length]]


def group_predictions(
    wanted: Predictions, rows_per_block: int, device: torch.device | str, own: range | None = None
) -> Cells:
    """Group predictions and cut their rows into blocks. Rows that predict nothing are in no block.

    Args:
        wanted: which row predicts what, M positions.
        rows_per_block: rows whose logits exist at the same time.
        device: where the groupings go.
        own: token ids of this process's rows of the LM head; None is all of them. Without rows there are no blocks.
    """
    row, target, scale = wanted
    keys = (target, row) if scale is None else (target, scale, row)
    order = np.lexsort(keys).astype(np.int64)
    new_row = _changes(row[order])
    new_distribution = new_row if scale is None else new_row | _changes(scale[order])
    new_cell = new_distribution | _changes(target[order])

    def put(array: Any) -> Tensor:
        return place(array, device)

    by = SortedCells(
        rows=row[order][new_row],
        target=target[order][new_cell],
        scale=None if scale is None else scale[order][new_distribution],
        distributions=_lengths(new_row[new_distribution]),
        cells=_lengths(new_distribution[new_cell]),
    )
    has_rows = own is None or len(own) > 0
    return Cells(
        order=put(order),
        cell_length=put(_lengths(new_cell)),
        distribution_length=put(_lengths(new_distribution)),
        blocks=tuple(cut_blocks(by, rows_per_block, put, own)) if has_rows else (),
    )


def _changes(values: Any) -> Any:
    """Where a sorted list differs from the entry before it; the first always does."""
    return np.concatenate((np.ones(min(len(values), 1), dtype=np.bool_), values[1:] != values[:-1]))


def _lengths(starts: Any) -> Int64:
    """Lengths of the runs that begin where `starts` is True."""
    return np.diff(np.append(np.flatnonzero(starts), len(starts))).astype(np.int64)
