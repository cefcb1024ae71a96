"""Longest common prefixes of lexicographically sorted trajectories, in O(1) each (SPEC section 1)."""

from __future__ import annotations

import numpy as np

from harts.ir.base import Int64


class LcpIndex:
    """Range-minimum index over adjacent LCPs.

    Args:
        length: tokens of each trajectory in sorted order, [N].
        lcp: `lcp[i]` is the LCP of trajectories i - 1 and i; `lcp[0]` is 0, [N].
    """

    def __init__(self, length: Int64, lcp: Int64) -> None:
        self.length = length
        self.lcp = lcp
        self._prefix = np.concatenate(([0], np.cumsum(length - lcp)))
        self.table = _sparse_table(lcp)

    def __len__(self) -> int:
        return len(self.length)

    def work(self, first: int, last: int) -> int:
        """Compact tokens of the interval first..last, both included (equation 5)."""
        return int(self._prefix[last + 1] - self._prefix[first] + self.lcp[first])

    def pair(self, a: int, b: int) -> int:
        """LCP of the trajectories at sorted positions a and b."""
        if a == b:
            return int(self.length[a])
        low, high = (a, b) if a < b else (b, a)
        return self.minimum(low + 1, high)

    def minimum(self, first: int, last: int) -> int:
        """Least adjacent LCP of positions first..last, both included."""
        level = (last - first + 1).bit_length() - 1
        row = self.table[level]
        return int(min(row[first], row[last - (1 << level) + 1]))

    def set_work(self, members: Int64) -> int:
        """Compact tokens of a set of sorted positions given in ascending order."""
        if len(members) == 0:
            return 0
        return int(self.length[members].sum() - self.neighbours(members[:-1], members[1:]).sum())

    def neighbours(self, a: Int64, b: Int64) -> Int64:
        """LCP of each pair (a[i], b[i]) with a < b, [M]."""
        if len(a) == 0:
            return np.zeros(0, dtype=np.int64)
        span = b - a
        level = np.frexp(span.astype(np.float64))[1] - 1
        table = self.table
        out: Int64 = np.minimum(table[level, a + 1], table[level, b - (1 << level) + 1])
        return out


def _sparse_table(values: Int64) -> Int64:
    """`table[j, i]` is the minimum of values[i : i + 2**j]; columns past the end repeat the level below."""
    count = len(values)
    levels = max(count.bit_length(), 1)
    table = np.empty((levels, count), dtype=np.int64)
    table[0] = values
    for level in range(1, levels):
        half = 1 << (level - 1)
        table[level] = table[level - 1]
        if count > half:
            np.minimum(table[level - 1, :-half], table[level - 1, half:], out=table[level, :-half])
    return table
