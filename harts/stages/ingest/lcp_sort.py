"""Merge sort of token strings that carries LCPs, so that what two trajectories share is compared once.

Every run is sorted and knows the LCP of each trajectory with the one before it. Of two heads the one that shares more
with the last output comes first, whatever follows; only heads that share equally much are compared, from there on.
A comparison raises one trajectory's LCP by the tokens that it found equal, and no LCP ever falls: all merges together
find at most S tokens equal, and each of the N log N steps at most one pair unequal.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from harts.compiled import compiled
from harts.ir.base import Int32, Int64

Scalar = TypeVar("Scalar", bound=np.generic)

BLOCK = 128
"""Tokens that are compared without a branch between them, which is what lets the compiler use vectors."""


def lcp_sort(tokens: Int32, offset: Int64) -> tuple[Int64, Int64]:
    """Sort trajectories stably by token id; a strict prefix comes before what extends it.

    Args:
        tokens: ids of all trajectories, int32 [S]. Read-only or mapped from a file will do; never copied.
        offset: trajectory i is tokens[offset[i]:offset[i + 1]], int64 [N+1].

    Returns:
        The trajectory at each sorted position, and the tokens that it shares with the one before it (0 for the first),
        both int64 [N]. The sort takes 32 N bytes beside them.
    """
    runs = np.zeros((len(offset) - 1, 2), dtype=np.int64)
    runs[:, 0] = np.arange(len(runs))
    _sort(_read_only(tokens), _read_only(offset), runs)
    return runs[:, 0].copy(), runs[:, 1].copy()


def _read_only(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """The same memory as a plain read-only array, so that one compiled version serves whatever a caller holds."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


@compiled
def common_prefix(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix of two token strings, [n] and [m]."""
    limit = min(len(a), len(b))
    done = 0
    while done + BLOCK <= limit:
        x, y = a[done : done + BLOCK], b[done : done + BLOCK]
        differs = np.int32(0)
        for i in range(BLOCK):
            differs |= x[i] ^ y[i]
        if differs != 0:
            break
        done += BLOCK
    while done < limit and a[done] == b[done]:
        done += 1
    return done


@compiled
def _sort(tokens: Int32, offset: Int64, runs: Int64) -> None:
    """Sort in place. Runs of one to begin with, each row a trajectory and its LCP, 0; int64 [N, 2]."""
    merged = np.empty_like(runs)
    size = len(runs)
    width = 1
    while width < size:
        for low in range(0, size, 2 * width):
            middle, high = min(low + width, size), min(low + 2 * width, size)
            _merge(tokens, offset, runs[low:middle], runs[middle:high], merged[low:high])
        runs[:] = merged
        width *= 2


@compiled
def _merge(tokens: Int32, offset: Int64, left: Int64, right: Int64, merged: Int64) -> None:
    """Merge two runs, [n, 2] and [m, 2], into [n + m, 2]. Of equal trajectories the left run's come first."""
    i, j = 0, 0
    shared_i, shared_j = 0, 0  # LCP of each head with the last output
    for k in range(len(merged)):
        if j == len(right):
            take_left = True
        elif i == len(left):
            take_left = False
        elif shared_i != shared_j:
            take_left = shared_i > shared_j
        else:
            a = tokens[offset[left[i, 0]] + shared_i : offset[left[i, 0] + 1]]
            b = tokens[offset[right[j, 0]] + shared_j : offset[right[j, 0] + 1]]
            more = common_prefix(a, b)
            take_left = more == len(a) or (more < len(b) and a[more] < b[more])
            if take_left:
                shared_j += more
            else:
                shared_i += more
        if take_left:
            merged[k, 0], merged[k, 1] = left[i, 0], shared_i
            i += 1
            shared_i = left[i, 1] if i < len(left) else 0
        else:
            merged[k, 0], merged[k, 1] = right[j, 0], shared_j
            j += 1
            shared_j = right[j, 1] if j < len(right) else 0
