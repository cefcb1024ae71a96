"""Coefficients from measured times: least squares on the relative error, none of them negative."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from harts.ir.base import Float64


def fitted(counts: Float64, measured: Float64) -> Float64:
    """The non-negative coefficients x that minimise the sum of squares of (counts @ x - measured) / measured.

    At the minimum the coefficients that are not 0 are the free least-squares solution of their own columns, so that the
    best of all subsets with a non-negative solution is the exact answer.

    Args:
        counts: how often each of n terms occurs in each of m microbatches, [m, n].
        measured: times, positive, [m].

    Returns:
        [n], in the unit of `measured`.
    """
    relative = counts / measured[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    relative = relative / scale
    best, least = np.zeros(counts.shape[1]), float(len(measured))
    for size in range(1, counts.shape[1] + 1):
        for subset in combinations(range(counts.shape[1]), size):
            columns = relative[:, subset]
            solution = np.linalg.lstsq(columns, np.ones(len(measured)))[0]
            residual = float(np.square(columns @ solution - 1).sum())
            if (solution >= 0).all() and residual < least:
                least, best = residual, np.zeros(counts.shape[1])
                best[list(subset)] = solution
    return np.asarray(best / scale)


def relative_errors(counts: Float64, measured: Float64, coefficients: Float64) -> Float64:
    """|counts @ coefficients - measured| / measured, [m]."""
    return np.asarray(np.abs(counts @ coefficients / measured - 1))
