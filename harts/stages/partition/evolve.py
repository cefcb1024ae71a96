"""Contiguous partitions of many trajectories: the natural partition evolved to sampled numbers of microbatches."""

from __future__ import annotations

import numpy as np

from harts.ir.base import Int64
from harts.stages.partition.spans import Spans

SAMPLES = 32
"""At most this many K are tried (Q_max)."""


def sampled(counts: range) -> list[int]:
    """Both ends of the range, half of the samples dense from the small end, the others spread over all of it."""
    if len(counts) <= SAMPLES:
        return list(counts)
    dense = SAMPLES // 2
    spread = np.linspace(0, len(counts) - 1, SAMPLES - dense + 1).round().astype(int).tolist()
    return [counts[i] for i in sorted({*range(dense), *spread})]


def evolved_cuts(spans: Spans, capacity: int, natural: Int64, targets: list[int]) -> dict[int, Int64]:
    """Merge or split the natural partition to each target number of microbatches.

    Args:
        spans: work of intervals.
        capacity: compact tokens that a microbatch may hold.
        natural: cuts of P0, [K0-1].
        targets: the K wanted.

    Returns:
        K -> its cuts, [K-1]; a K that no legal operation leads to is absent.
    """
    splits, merges = _split_order(spans, natural), _merge_order(spans, capacity, natural)
    found = {}
    for count in targets:
        more = count - 1 - len(natural)
        if 0 <= more <= len(splits):
            found[count] = np.sort(np.concatenate((natural, splits[:more])))
        elif 0 < -more <= len(merges):
            found[count] = np.setdiff1d(natural, merges[:-more])
    return found


def _split_order(spans: Spans, natural: Int64) -> Int64:
    """Positions that are no cuts, cheapest first: a split there costs its LCP whatever else is split."""
    inner = np.setdiff1d(np.arange(1, len(spans)), natural)
    return inner[np.argsort(spans.lcp[inner], kind="stable")]


def _merge_order(spans: Spans, capacity: int, natural: Int64) -> Int64:
    """Cuts in the order in which the largest saving removes them, until no two neighbours fit into one microbatch.

    One pass is enough: microbatches only grow, so that neighbours which do not fit never will.
    """
    edges = [0, *natural.tolist(), len(spans)]
    before = list(range(-1, len(edges) - 1))
    after = list(range(1, len(edges) + 1))
    removed = []
    for i in np.argsort(-spans.lcp[natural], kind="stable").tolist():
        edge = i + 1
        left, right = before[edge], after[edge]
        if spans.work(edges[left], edges[right]) <= capacity:
            after[left], before[right] = right, left
            removed.append(edges[edge])
    return np.array(removed, dtype=np.int64)
