"""Which rows form the chunks that are computed in parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.placing import place
from harts.ir.base import Int64
from harts.ir.runs import offsets

CHUNK = 64
"""Tokens a chunk."""
SUB_CHUNK = 16
"""Tokens of the blocks on the diagonal of a chunk's matrices."""


class Inputs(NamedTuple):
    """Rows of one buffer, or their gradients. T rows; L gates of a head (K for kda, none for gdn)."""

    q: Tensor
    """[T, H, K]."""
    k: Tensor
    """[T, H, K]."""
    v: Tensor
    """[T, HV, V]."""
    g: Tensor
    """Natural logarithm, [T, HV, K] or [T, HV]."""
    beta: Tensor
    """[T, HV]."""


@dataclass(frozen=True)
class Grid:
    """Runs of consecutive rows, and the chunks of those runs that are chunked."""

    cu_seqlens: Tensor
    """Bounds of the runs, rising from 0 to `rows`, int64 on the device, [runs + 1]."""
    chunk_indices: Tensor
    """(run, chunk of the run), int64 on the device, [chunks, 2]."""
    rows: int
    chunks: int
    runs: int


def chunk_grid(length: Int64, chunked: np.ndarray, device: torch.device) -> Grid:
    """Lay runs of `length` rows side by side; runs that are not `chunked` keep their place only."""
    count = np.where(chunked, -(-length // CHUNK), 0)
    run = np.repeat(np.arange(len(length)), count)
    chunk = np.arange(len(run)) - np.repeat(offsets(count)[:-1], count)
    bounds = offsets(length)
    return Grid(
        cu_seqlens=place(bounds, device),
        chunk_indices=place(np.stack([run, chunk], axis=1).astype(np.int64), device),
        rows=int(bounds[-1]),
        chunks=len(run),
        runs=len(length),
    )
