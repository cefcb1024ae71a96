"""Fill one microbatch from a tree: the tree knapsack."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harts.compiled import compiled
from harts.ir.base import Int32, Int64

CELLS = 512
"""Capacities are rounded to this many cells; what is taken is measured exactly."""
SLACK = 3
"""Cells beyond the capacity, as rounded sizes may be too large."""

SKIP, OPEN, TAKE = 0, 1, 2


class Choice(NamedTuple):
    """Nodes below a fork, in postorder; the subtree of j is j - size[j] + 1 .. j."""

    node: Int64
    """Number in the whole tree, [m]."""
    size: Int64
    """Nodes of the subtree, [m]."""
    end: Int64
    """Depth, [m]."""
    tokens: Int64
    """Of a node's own run, [m]."""
    profit: Int64
    """Of taking the node with its whole subtree, its own part, [m]."""
    leaf: NDArray[np.bool_]
    """Trajectories, [m]."""


class Sums(NamedTuple):
    """Of the same nodes."""

    own: Int64
    """Cells of a node's own run, [m]."""
    whole: Int64
    """Cells of its subtree, [m]."""
    profit: Int64
    """Of its subtree, [m]."""
    exact: Int64
    """Tokens of its subtree, [m]."""


@compiled
def fill(choice: Choice, base: int, room: int, penalty: int, best: NDArray[np.int32]) -> Int32:
    """Choose what one microbatch takes below a fork, for the largest profit.

    A subtree is taken whole, for its profit; opened, so that parts of it can be taken; or skipped. An opened node's own
    tokens must be computed again by others: they use capacity, earn nothing and are punished. With f the best profit at
    each capacity of the nodes up to j, over j in postorder,
    f_j(c) = max(f_before(c), f_before(c - size) + profit, f_{j-1}(c - tokens) - penalty * tokens),
    where f_before leaves the whole subtree out. Ends of paths are rounded, not lengths, so that errors do not add up
    along a path.

    Args:
        choice: the nodes.
        base: depth of the fork.
        room: compact tokens that the microbatch can hold below it.
        penalty: of 64 opened tokens, in the unit of the profits.
        best: space for f, [>= m + 1, CELLS].

    Returns:
        SKIP, OPEN or TAKE of each node that is reached from above, [m]. What is taken and opened has at most `room`
        tokens.
    """
    count = len(choice.size)
    quantum = max(1, (room + CELLS - SLACK - 2) // (CELLS - SLACK - 1))
    own = np.empty(count, dtype=np.int64)
    whole = np.empty(count, dtype=np.int64)
    profit = np.empty(count, dtype=np.int64)
    exact = np.empty(count, dtype=np.int64)
    cells = min(CELLS, room // quantum + 1 + SLACK)
    best[0, :cells] = 0
    for j in range(count):
        above = choice.end[j] - choice.tokens[j] - base
        own[j] = (choice.end[j] - base + quantum // 2) // quantum - (above + quantum // 2) // quantum
        whole[j], profit[j], exact[j] = own[j], choice.profit[j], choice.tokens[j]
        child, before = j - 1, j - choice.size[j]
        while child > before:
            whole[j] += whole[child]
            profit[j] += profit[child]
            exact[j] += exact[child]
            child -= choice.size[child]
        _take(best[j + 1], best[before + 1], min(whole[j], cells), profit[j], cells)
        if not choice.leaf[j]:
            _open(best[j + 1], best[j], min(own[j], cells), choice.tokens[j] * penalty // 64, cells)
    taken = np.empty(count, dtype=np.int32)
    limit = cells - 1
    while True:
        used = _trace(choice, Sums(own, whole, profit, exact), best, limit, taken)
        if used <= room:
            return taken
        limit -= max(1, (used - room) // quantum)


@compiled
def _trace(choice: Choice, sums: Sums, best: Int32, limit: int, taken: Int32) -> int:
    """Follow the best choice at a capacity of `limit` cells; returns its exact tokens. At less than 0, nothing."""
    taken[:] = SKIP
    used, j = 0, len(taken) - 1
    while j >= 0 and limit >= 0:
        before = j - choice.size[j]
        value = best[j + 1, limit]
        if value == best[before + 1, limit]:
            j = before
        elif limit >= sums.whole[j] and value == best[before + 1, limit - sums.whole[j]] + sums.profit[j]:
            taken[j] = TAKE
            used += sums.exact[j]
            limit -= sums.whole[j]
            j = before
        else:
            taken[j] = OPEN
            used += choice.tokens[j]
            limit -= sums.own[j]
            j -= 1
    return used


@compiled
def _take(out: Int32, before: Int32, size: int, profit: int, cells: int) -> None:
    for c in range(size):
        out[c] = before[c]
    for c in range(size, cells):
        out[c] = max(before[c], before[c - size] + profit)


@compiled
def _open(out: Int32, inner: Int32, size: int, loss: int, cells: int) -> None:
    for c in range(size, cells):
        out[c] = max(out[c], inner[c - size] - loss)
