"""What is searched: sorted trajectories, their shared prefixes, what they cost, and how much fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64


class Problem(NamedTuple):
    """N trajectories in sorted order, and the limits of a partition."""

    length: Int64
    """Tokens of each, [N]."""
    lcp: Int64
    """Tokens shared with the one before, 0 for the first, [N]."""
    minima: Int64
    """`minima[j, i]` is the least of lcp[i : i + 2**j], [log N, N]."""
    along: Int64
    """Cost of the first p positions of a path, [L+1]."""
    fork: Int64
    """Cost of each child after the first at a fork of depth p, [L+1]."""
    capacity: int
    """Compact tokens that a microbatch may hold; no trajectory is longer."""
    replicas: int
    """D: what a slot has microbatches."""
    multiple: int
    """What the number of microbatches is a multiple of."""
    total_weight: int
    """Weight of the total cost; that of the slots' heaviest is 1."""


@compiled
def shared(minima: Int64, a: int, b: int) -> int:
    """Tokens that the trajectories at sorted positions a < b share."""
    level, span = 0, b - a
    while (2 << level) <= span:
        level += 1
    return int(min(minima[level, a + 1], minima[level, b - (1 << level) + 1]))


@compiled
def cost_after(problem: Problem, before: int, x: int, common: int) -> int:
    """What trajectory x costs in a microbatch after its sorted neighbour `before` (-1: none), sharing `common`."""
    cost = int(problem.along[problem.length[x]] - problem.along[common])
    if before >= 0 and common < problem.length[before]:
        cost += int(problem.fork[common])
    return cost


@compiled
def measure(problem: Problem, members: Int64) -> tuple[int, int]:
    """Compact tokens and cost of a microbatch with these sorted positions, ascending, [n]."""
    work, cost, before = 0, 0, -1
    for x in members:
        common = shared(problem.minima, before, x) if before >= 0 else 0
        work += problem.length[x] - common
        cost += cost_after(problem, before, x, common)
        before = x
    return work, cost


@compiled
def lcp_among(problem: Problem, members: Int64) -> Int64:
    """Tokens that each of some sorted positions, ascending, shares with the one before, 0 for the first, [n]."""
    lcp = np.zeros(len(members), dtype=np.int64)
    for j in range(1, len(members)):
        lcp[j] = shared(problem.minima, members[j - 1], members[j])
    return lcp
