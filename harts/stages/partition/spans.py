"""Contiguous microbatches: intervals of sorted positions, and labels made from their cuts.

`cuts` are the sorted positions at which a microbatch begins, ascending, without the first one, [K-1]. `label` is the
microbatch of each sorted position, [N].
"""

from __future__ import annotations

import numpy as np

from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex


class Spans:
    """Compact work of intervals [first, stop) of sorted positions (5), for numbers and for arrays.

    Attributes:
        lcp: tokens shared with the trajectory before, [N]: what a cut there costs (6).
        closing: compact tokens of the positions before `stop`, [N+1].
        opening: what of them an interval that begins at `first` lacks, [N]. It never falls, so that an interval
            gets no heavier when its first position moves right.
    """

    def __init__(self, index: LcpIndex) -> None:
        self.lcp = index.lcp
        self.closing: Int64 = np.concatenate(([0], np.cumsum(index.length - index.lcp)))
        self.opening: Int64 = self.closing[:-1] - index.lcp

    def __len__(self) -> int:
        return len(self.lcp)

    def work(self, first: int, stop: int) -> int:
        """Compact tokens of [first, stop)."""
        return int(self.closing[stop] - self.opening[first])


def label_of_cuts(cuts: Int64, count: int) -> Int64:
    """Microbatch of each of `count` sorted positions, [N]."""
    begins = np.zeros(count, dtype=np.int64)
    begins[cuts] = 1
    return np.cumsum(begins)


def cuts_of_label(label: Int64) -> Int64 | None:
    """The cuts of a partition, [K-1], or None if a microbatch is not an interval."""
    cuts = np.flatnonzero(np.diff(label)) + 1
    return cuts if len(cuts) == len(np.unique(label)) - 1 else None
