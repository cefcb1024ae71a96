"""Sparse repair: the best single move or swap of near trajectories, a few times over (SPEC section 2)."""

from __future__ import annotations

import numpy as np

from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.stages.partition.labels import Sets, sets_of


def repaired(index: LcpIndex, capacity: int, label: Int64, reach: int, updates: int) -> Int64:
    """Apply the move that saves most or, if none saves, the swap that does; stop when neither does.

    Args:
        index: LCPs of sorted positions.
        capacity: compact tokens that a microbatch may hold.
        label: microbatch of each sorted position, 0..K-1, [N].
        reach: most positions between a moved trajectory and a member of its destination, or between swapped ones.
        updates: most moves and swaps.
    """
    label = label.copy()
    for _ in range(updates):
        sets = sets_of(index, label)
        update = _best_move(index, capacity, label, sets, reach) or _best_swap(index, capacity, label, sets, reach)
        if update is None:
            break
        positions, destinations = update
        label[positions] = destinations
    return label


Update = tuple[list[int], list[int]]
"""Positions, and the microbatches that they go to."""


def _best_move(index: LcpIndex, capacity: int, label: Int64, sets: Sets, reach: int) -> Update | None:
    x, y = _near_pairs(label, reach)
    x, y = np.concatenate((x, y)), np.concatenate((y, x))
    x, y = x[sets.size[label[x]] > 1], y[sets.size[label[x]] > 1]
    target = label[y]
    shared = _shared_with(index, sets, target, x, np.full_like(x, -1))
    saved = shared - sets.shared[x]
    saved[sets.work[target] + index.length[x] - shared > capacity] = 0
    best = _largest(saved, x, target)
    return None if best is None else ([int(x[best])], [int(target[best])])


def _best_swap(index: LcpIndex, capacity: int, label: Int64, sets: Sets, reach: int) -> Update | None:
    x, y = _near_pairs(label, reach)
    grow_y = index.length[x] - _shared_with(index, sets, label[y], x, y) - index.length[y] + sets.shared[y]
    grow_x = index.length[y] - _shared_with(index, sets, label[x], y, x) - index.length[x] + sets.shared[x]
    saved = -(grow_x + grow_y)
    saved[(sets.work[label[x]] + grow_x > capacity) | (sets.work[label[y]] + grow_y > capacity)] = 0
    best = _largest(saved, x, y)
    if best is None:
        return None
    a, b = int(x[best]), int(y[best])
    return [a, b], [int(label[b]), int(label[a])]


def _near_pairs(label: Int64, reach: int) -> tuple[Int64, Int64]:
    """All x < y of different microbatches, at most `reach` positions apart."""
    count = len(label)
    x = np.concatenate([np.arange(max(count - d, 0)) for d in range(1, reach + 1)])
    y = np.concatenate([np.arange(min(d, count), count) for d in range(1, reach + 1)])
    apart = label[x] != label[y]
    return x[apart], y[apart]


def _shared_with(index: LcpIndex, sets: Sets, microbatch: Int64, x: Int64, leaving: Int64) -> Int64:
    """Most tokens that x shares with a member of a microbatch other than `leaving` (-1: none leaves), [M]."""
    count = len(sets.key)
    at = np.searchsorted(sets.key, microbatch * count + x)
    found = np.zeros(len(x), dtype=np.int64)
    for side, step in ((at - 1, -1), (at, 1)):
        key = _member(sets, side)
        side = np.where(key == microbatch * count + leaving, side + step, side)  # noqa: PLW2901
        key = _member(sets, side)
        inside = key // count == microbatch
        other, own = key[inside] % count, x[inside]
        found[inside] = np.maximum(found[inside], index.neighbours(np.minimum(other, own), np.maximum(other, own)))
    return found


def _member(sets: Sets, at: Int64) -> Int64:
    """Key at each place, -1 past either end."""
    inside = (at >= 0) & (at < len(sets.key))
    return np.where(inside, sets.key[np.clip(at, 0, len(sets.key) - 1)], -1)


def _largest(saved: Int64, x: Int64, then: Int64) -> int | None:
    """Place of the largest positive saving, ties by x, then by `then`."""
    if len(saved) == 0 or saved.max() <= 0:
        return None
    tied = np.flatnonzero(saved == saved.max())
    return int(tied[np.lexsort((then[tied], x[tied]))[0]])
