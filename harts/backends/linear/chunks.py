"""The chunk grid of one packed call: which row is where, and which chunks each step of the state scan takes.

Chunks are ordered by step (chunk 0 of every sequence, then chunk 1 of those that have one, ...), and inside a step
longer sequences come first: the sequences of a step are a prefix of those of the step before.

Shape suffixes: T packed rows, N sequences, C chunks of the call, B rows of a chunk (padded to a power of two).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.backends.plan_tensors import PackedCall


class ChunkGrid(NamedTuple):
    """Index tables of one packed call, on the device of its rows (counts on the host)."""

    size: int
    """B."""
    row_of_cell: Tensor
    """Packed row in each cell, -1 is none, [C * B]."""
    cell_of_row: Tensor
    """[T]."""
    counts: list[int]
    """Chunks of each step, descending."""
    order: Tensor
    """Sequences by descending chunk count, [N]."""
    chunk_of_state: Tensor
    """Chunk after which each requested state is taken; C + n is the initial state of order[n], [P]."""


def chunk_grid(packed: PackedCall, device: torch.device) -> ChunkGrid:
    """Lay the sequences of a packed call out in chunks; made on the host, then moved."""
    cu_seqlens, chunk_size = packed.cu_seqlens, packed.chunk_size
    size = 1 << (chunk_size - 1).bit_length()
    length = cu_seqlens.diff()
    chunks = (length + chunk_size - 1) // chunk_size
    order = chunks.argsort(descending=True, stable=True)
    rank = order.argsort()
    sequence = order.repeat_interleave(chunks[order])
    step = torch.arange(len(sequence)) - (chunks[order].cumsum(0) - chunks[order]).repeat_interleave(chunks[order])
    by_step = step.argsort(stable=True)
    sequence, step = sequence[by_step], step[by_step]
    counts = step.bincount()
    offset = step[:, None] * chunk_size + torch.arange(size)
    inside = (offset < length[sequence, None]) & (torch.arange(size) < chunk_size)
    row_of_cell = torch.where(inside, offset + cu_seqlens[sequence, None], -1).flatten()
    cells = inside.flatten().nonzero().flatten()
    cell_of_row = torch.empty_like(cells)
    cell_of_row[row_of_cell[cells]] = cells
    first = counts.cumsum(0) - counts
    last_step = (packed.state_offset + chunk_size - 1) // chunk_size - 1
    taken = torch.where(last_step < 0, len(sequence), first[last_step.clamp(min=0)]) + rank[packed.state_sequence]
    return ChunkGrid(
        size, row_of_cell.to(device), cell_of_row.to(device), counts.tolist(), order.to(device), taken.to(device)
    )


def to_cells(x: Tensor, grid: ChunkGrid) -> Tensor:
    """Move packed rows [T, ...] into chunks [C * B, ...]; cells without a row are zero."""
    found: Tensor = _Move.apply(x, grid.row_of_cell, grid.cell_of_row)  # type: ignore[no-untyped-call]
    return found


def to_rows(x: Tensor, grid: ChunkGrid) -> Tensor:
    """Move chunks [C * B, ...] back into packed rows [T, ...]."""
    found: Tensor = _Move.apply(x, grid.cell_of_row, grid.row_of_cell)  # type: ignore[no-untyped-call]
    return found


class _Move(torch.autograd.Function):
    """A gather whose index names every source once at most, so that its backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return _gather(x, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return _gather(grads[0], inverse), None, None


def _gather(x: Tensor, index: Tensor) -> Tensor:
    found = x.index_select(0, index.clamp(min=0))
    return found.index_fill_(0, (index < 0).nonzero().flatten(), 0)
