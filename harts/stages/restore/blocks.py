"""Rows whose logits exist at the same time, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from harts.ir.base import Float64, Int64
from harts.ir.runs import offsets, ranges


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
    """Cells of these distributions whose target is a row of this process's LM head, [c]."""
    slot: Tensor
    """Index into this group of each such cell's distribution, [c]."""
    target: Tensor
    """Row of this process's LM head of each such cell, [c]."""


@dataclass(frozen=True)
class Block:
    """Rows whose logits exist at the same time."""

    rows: Tensor
    """Compact rows, unique over all blocks, [b]."""
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class SortedCells:
    """Cells sorted by row, temperature and target, on the host."""

    rows: Int64
    """Compact rows that predict something, unique."""
    target: Int64
    """Token id of each cell."""
    scale: Float64 | None
    """Inverse temperature of each distribution; None is 1."""
    distributions: Int64
    """Distributions of each row."""
    cells: Int64
    """Cells of each distribution."""


def cut_blocks(
    by: SortedCells, rows_per_block: int, put: Callable[[Any], Tensor], own: range | None
) -> Iterator[Block]:
    """Cut rows into blocks, in order.

    Args:
        by: what is predicted.
        rows_per_block: rows of each block but the last.
        put: makes a tensor of an array.
        own: token ids of this process's rows of the LM head; None is all of them.
    """
    first_distribution, first_cell = offsets(by.distributions), offsets(by.cells)
    for begin in range(0, len(by.rows), rows_per_block):
        rows = np.arange(begin, min(begin + rows_per_block, len(by.rows)))
        groups = []
        for rank in range(int(by.distributions[rows].max())):
            local = np.flatnonzero(by.distributions[rows] > rank)
            distribution = first_distribution[rows[local]] + rank
            cell = ranges(first_cell[distribution], first_cell[distribution + 1])
            slot = np.repeat(np.arange(len(distribution)), by.cells[distribution])
            target = by.target[cell]
            if own is not None:
                mine = (target >= own.start) & (target < own.stop)
                cell, slot, target = cell[mine], slot[mine], target[mine] - own.start
            groups.append(
                Group(
                    local=None if rank == 0 else put(local),
                    scale=None if by.scale is None else put(by.scale[distribution][:, None]),
                    distribution=put(distribution),
                    cell=put(cell),
                    slot=put(slot),
                    target=put(target),
                )
            )
        yield Block(put(by.rows[rows]), tuple(groups))
