"""Predictions grouped so that logits, softmax and target logit are each computed once for all that share them.

Positions with equal (row, temperature, target) share a cell, cells with equal (row, temperature) share a
distribution, distributions of a row share its logits. Sums over what shares something are over contiguous pieces
in one fixed order, and every scatter has unique indices: results do not depend on threads or atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.ir.base import Float64, Int64
from harts.ir.runs import offsets, ranges
from harts.stages.restore.labels import Predictions


@dataclass(frozen=True)
class Group:
    """The k-th temperature of every row of a block that has so many: at most one distribution a row."""

    local: Tensor | None
    """Row in the block of each distribution, [g]; None is all of them, in order."""
    scale: Tensor | None
    """Inverse temperature of each, float64, [g, 1]; None is 1."""
    distribution: Tensor
    """Number of each among all distributions, [g]."""
    cell: Tensor
    """Cells of these distributions, [c]."""
    slot: Tensor
    """Index into this group of each cell's distribution, [c]."""
    target: Tensor
    """Token id of each cell, [c]."""


@dataclass(frozen=True)
class Block:
    """Rows whose logits exist at the same time."""

    rows: Tensor
    """Compact rows, unique over all blocks, [b]."""
    groups: tuple[Group, ...]


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


def group_predictions(wanted: Predictions, rows_per_block: int, device: torch.device | str) -> Cells:
    """Group predictions and cut their rows into blocks. Rows that predict nothing are in no block."""
    row, target, scale = wanted
    keys = (target, row) if scale is None else (target, scale, row)
    order = np.lexsort(keys).astype(np.int64)
    new_row = _changes(row[order])
    new_distribution = new_row if scale is None else new_row | _changes(scale[order])
    new_cell = new_distribution | _changes(target[order])
    put = _Put(device)
    sorted_by = _Sorted(
        rows=row[order][new_row],
        target=target[order][new_cell],
        scale=None if scale is None else scale[order][new_distribution],
        distributions=_lengths(new_row[new_distribution]),
        cells=_lengths(new_distribution[new_cell]),
    )
    return Cells(
        order=put(order),
        cell_length=put(_lengths(new_cell)),
        distribution_length=put(_lengths(new_distribution)),
        blocks=tuple(_blocks(sorted_by, rows_per_block, put)),
    )


class _Put:
    def __init__(self, device: torch.device | str) -> None:
        self.device = device

    def __call__(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


@dataclass(frozen=True)
class _Sorted:
    rows: Int64
    target: Int64
    """Of each cell."""
    scale: Float64 | None
    """Of each distribution."""
    distributions: Int64
    """Distributions of each row."""
    cells: Int64
    """Cells of each distribution."""


def _blocks(by: _Sorted, rows_per_block: int, put: _Put) -> Iterator[Block]:
    first_distribution, first_cell = offsets(by.distributions), offsets(by.cells)
    for begin in range(0, len(by.rows), rows_per_block):
        rows = np.arange(begin, min(begin + rows_per_block, len(by.rows)))
        groups = []
        for rank in range(int(by.distributions[rows].max())):
            local = np.flatnonzero(by.distributions[rows] > rank)
            distribution = first_distribution[rows[local]] + rank
            cells = by.cells[distribution]
            cell = ranges(first_cell[distribution], first_cell[distribution + 1])
            groups.append(
                Group(
                    local=None if rank == 0 else put(local),
                    scale=None if by.scale is None else put(by.scale[distribution][:, None]),
                    distribution=put(distribution),
                    cell=put(cell),
                    slot=put(np.repeat(np.arange(len(distribution)), cells)),
                    target=put(by.target[cell]),
                )
            )
        yield Block(put(by.rows[rows]), tuple(groups))


def _changes(values: Any) -> Any:
    """Where a sorted list differs from the entry before it; the first always does."""
    return np.concatenate((np.ones(min(len(values), 1), dtype=np.bool_), values[1:] != values[:-1]))


def _lengths(starts: Any) -> Int64:
    """Lengths of the runs that begin where `starts` is True."""
    return np.diff(np.append(np.flatnonzero(starts), len(starts))).astype(np.int64)
