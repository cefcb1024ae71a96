"""The best contiguous partition for every number of microbatches (9)."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from harts.ir.base import Bool, Int64
from harts.stages.partition.spans import Spans

NEVER = 1 << 60
"""Cost of a state that no feasible partition reaches."""


def exact_cuts(spans: Spans, capacity: int, counts: range) -> dict[int, Int64]:
    """Least total work for each K, ties by the least maximum work of a microbatch.

    A cut at s costs its LCP wherever the microbatch ends (6), so that one row of states needs only the least cost in a
    window of starts, O(N * width), where `width` is the most trajectories that fit into one microbatch.

    Args:
        spans: work of intervals.
        capacity: compact tokens that a microbatch may hold.
        counts: the K wanted, ascending.

    Returns:
        K -> its cuts, [K-1]; a K without a feasible partition is absent.
    """
    table = _Windows(spans, capacity)
    count = len(spans)
    cost = np.full(count + 1, NEVER, dtype=np.int64)
    heaviest = np.zeros(count + 1, dtype=np.int64)
    cost[0] = 0
    starts: list[Int64] = []
    found = {}
    for k in range(1, min(counts[-1], count) + 1):
        cost, heaviest, start = table.advance(k, cost, heaviest)
        starts.append(start)
        if k in counts and cost[count] < NEVER:
            found[k] = _backtrack(starts, count)
    return found


class _Windows:
    """For each end e = 1..N, the starts s = e - width .. e - 1 of the interval [s, e)."""

    def __init__(self, spans: Spans, capacity: int) -> None:
        ends = np.arange(1, len(spans) + 1)
        first = np.searchsorted(spans.opening, spans.closing[1:] - capacity)
        self.lcp = spans.lcp
        self.width = int((ends - first).max())
        self.start: Int64 = ends[:, None] + np.arange(-self.width, 0)
        self.outside: Bool = self.start < first[:, None]
        self.work: Int64 = spans.closing[1:, None] - self._of(spans.opening, 0)

    def _of(self, values: Int64, padding: int) -> Int64:
        padded = np.concatenate((np.full(self.width, padding, dtype=np.int64), values))
        return sliding_window_view(padded, self.width)[1:]

    def advance(self, k: int, cost: Int64, heaviest: Int64) -> tuple[Int64, Int64, Int64]:
        """From the best k - 1 microbatches before each end to the best k: cost, heaviest, start of the last, [N+1]."""
        rows = slice(k - 1, None)  # fewer than k trajectories are no k microbatches
        costs = np.where(self.outside[rows], NEVER, self._of(cost[:-1] + self.lcp, NEVER)[rows])
        least = np.minimum(costs.min(axis=1), NEVER)
        heavier = np.maximum(self._of(heaviest[:-1], 0)[rows], self.work[rows])
        heavier = np.where(costs == least[:, None], heavier, NEVER)
        choice = heavier.argmin(axis=1)
        row = np.arange(len(choice))
        return (
            np.concatenate((np.full(k, NEVER), least)),
            np.concatenate((np.zeros(k, dtype=np.int64), heavier[row, choice])),
            np.concatenate((np.zeros(k, dtype=np.int64), self.start[rows][row, choice])),
        )


def _backtrack(starts: list[Int64], stop: int) -> Int64:
    cuts = []
    for start in reversed(starts):
        stop = int(start[stop])
        cuts.append(stop)
    return np.array(cuts[-2::-1], dtype=np.int64)
