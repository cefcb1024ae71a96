"""Ragged lists of half-open runs of rows: how the IR writes long index lists of a tree in little space."""

from __future__ import annotations

import numpy as np

from harts.ir.base import Int64


def expand_runs(start: Int64, length: Int64) -> Int64:
    """List the rows of all runs one after the other.

    Args:
        start: first row of each run, [M].
        length: rows of each run, [M], each at least 0.

    Returns:
        The rows, [sum(length)].
    """
    total = int(length.sum())
    shift = start - (np.cumsum(length) - length)
    return np.repeat(shift, length) + np.arange(total, dtype=np.int64)


def offsets(lengths: Int64) -> Int64:
    """Turn lengths [M] into offsets [M+1] that start at 0."""
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def ranges(start: Int64, stop: Int64) -> Int64:
    """List the integers of the half-open intervals [start, stop) one after the other."""
    return expand_runs(start, stop - start)
