"""The best partition into intervals of sorted positions, whatever their number."""

from __future__ import annotations

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64
from harts.stages.partition.search.problem import Problem, cost_after

NEVER = 1 << 62
"""Cost of a prefix of the order that nothing reaches."""


@compiled
def best_intervals(problem: Problem, members: Int64, lcp: Int64) -> tuple[Int64, int]:
    """Least total cost over all cuts of some trajectories, in O(n * width), width being what fits at most.

    Of equal costs the longest last interval is taken, so that there are few.

    Args:
        problem: what is searched.
        members: sorted positions, ascending, [n].
        lcp: tokens that each shares with the one before, [n].

    Returns:
        Interval of each, numbered from 0 in order, [n], and how many there are.
    """
    count = len(members)
    least = np.full(count + 1, NEVER, dtype=np.int64)
    least[0] = 0
    begin = np.zeros(count + 1, dtype=np.int64)
    for stop in range(1, count + 1):
        work, cost = 0, 0
        for first in range(stop - 1, -1, -1):  # the interval grows to the left: its old first now follows another
            x = members[first]
            if first + 1 < stop:
                after = members[first + 1]
                common = lcp[first + 1]
                work -= common
                cost += cost_after(problem, x, after, common) - problem.along[problem.length[after]]
            work += problem.length[x]
            cost += problem.along[problem.length[x]]
            if work > problem.capacity:
                break
            if least[first] + cost <= least[stop]:
                least[stop] = least[first] + cost
                begin[stop] = first
    label = np.empty(count, dtype=np.int64)
    cuts = 0
    stop = count
    while stop > 0:
        label[begin[stop] : stop] = cuts
        stop = begin[stop]
        cuts += 1
    label[:] = cuts - 1 - label
    return label, cuts
