"""Local refinement: change a few memberships at constant K, never for more work (SPEC section 2)."""

from __future__ import annotations

import numpy as np

from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.stages.partition.labels import renumbered
from harts.stages.partition.repair import repaired
from harts.stages.partition.spans import Spans, cuts_of_label, label_of_cuts

REACH = 8
"""Positions that a cut or a membership may move (H)."""
SWEEPS = 2
"""Sweeps over all cuts."""
UPDATES = 4
"""Moves and swaps."""


def refined(index: LcpIndex, capacity: int, label: Int64) -> Int64:
    """Move the cuts if all microbatches are intervals, then repair single memberships; K stays.

    Args:
        index: LCPs of sorted positions.
        capacity: compact tokens that a microbatch may hold.
        label: microbatch of each sorted position, [N].

    Returns:
        The labels of a partition with at most the same total work, [N].
    """
    cuts = cuts_of_label(label)
    if cuts is not None:
        label = label_of_cuts(moved_cuts(Spans(index), capacity, cuts), len(label))
    return renumbered(repaired(index, capacity, label, REACH, UPDATES))


def moved_cuts(spans: Spans, capacity: int, cuts: Int64) -> Int64:
    """Move each cut to the least total work of its two microbatches, then to the least maximum, [K-1]."""
    edges = [0, *cuts.tolist(), len(spans)]
    for _ in range(SWEEPS):
        before = list(edges)
        for i in range(1, len(edges) - 1):
            edges[i] = _best_cut(spans, capacity, edges[i - 1], edges[i], edges[i + 1])
        if edges == before:
            break
    return np.array(edges[1:-1], dtype=np.int64)


def _best_cut(spans: Spans, capacity: int, first: int, cut: int, stop: int) -> int:
    near = np.arange(max(first + 1, cut - REACH), min(stop - 1, cut + REACH) + 1)
    heavier = np.maximum(spans.closing[near] - spans.opening[first], spans.closing[stop] - spans.opening[near])
    fits = heavier <= capacity
    near, heavier = near[fits], heavier[fits]
    order = np.lexsort((near != cut, heavier, spans.lcp[near]))
    return int(near[order[0]])
