"""The natural partition P0, and the range of microbatch counts that it spans (SPEC section 2)."""

from __future__ import annotations

import numpy as np

from harts.ir.base import Int64
from harts.stages.partition.spans import Spans


def natural_cuts(spans: Spans, capacity: int) -> Int64:
    """Split every interval heavier than the capacity at its lowest adjacent LCP, until none is left.

    Ties go to the smaller heavier side, then to the smaller difference of the two, then to the first position.

    Args:
        spans: work of intervals.
        capacity: compact tokens that a microbatch may hold; no single trajectory is longer.

    Returns:
        The cuts of P0, [K0-1].
    """
    cuts: list[int] = []
    open_intervals = [(0, len(spans))]
    while open_intervals:
        first, stop = open_intervals.pop()
        if spans.work(first, stop) > capacity:
            cut = lowest_valley(spans, first, stop)
            cuts.append(cut)
            open_intervals += [(first, cut), (cut, stop)]
    return np.array(sorted(cuts), dtype=np.int64)


def lowest_valley(spans: Spans, first: int, stop: int) -> int:
    """Where to split [first, stop), which holds at least two trajectories."""
    inner = spans.lcp[first + 1 : stop]
    valleys = np.flatnonzero(inner == inner.min()) + first + 1
    left = spans.closing[valleys] - spans.opening[first]
    right = spans.closing[stop] - spans.opening[valleys]
    order = np.lexsort((abs(left - right), np.maximum(left, right)))
    return int(valleys[order[0]])


def count_range(compact_tokens: int, capacity: int, multiple: int, natural: int, trajectories: int) -> range:
    """Microbatch counts K to search: K_min (7) to K_max (8), multiples of `multiple`.

    Args:
        compact_tokens: work G of all trajectories in one trie.
        capacity: T.
        multiple: D times the multiple that the slots of a replica are of.
        natural: K0.
        trajectories: N.
    """
    least = multiple * max(1, -(-compact_tokens // (capacity * multiple)))
    most = max(least, min(multiple * -(-natural // multiple), multiple * (trajectories // multiple)))
    return range(least, most + 1, multiple)
