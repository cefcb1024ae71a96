"""Any partition as labels: the microbatch of each sorted position, [N]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex


class Sets(NamedTuple):
    """The microbatches of a partition and what their members share, K of N positions."""

    key: Int64
    """label * N + position of every position, ascending, [N]."""
    adjacent: Int64
    """Tokens shared with the member before in the same microbatch, in the order of `key`; 0 for the first, [N]."""
    shared: Int64
    """Most tokens that each position shares with another member of its microbatch, [N]."""
    size: Int64
    """Members of each microbatch, [K]."""
    work: Int64
    """Compact tokens of each microbatch, [K]."""


def sets_of(index: LcpIndex, label: Int64) -> Sets:
    """Measure a partition whose labels are 0..K-1, none of them unused."""
    count = len(label)
    order = np.argsort(label, kind="stable")
    same = label[order][1:] == label[order][:-1]
    adjacent = np.zeros(count, dtype=np.int64)
    adjacent[1:][same] = index.neighbours(order[:-1][same], order[1:][same])
    shared = np.empty(count, dtype=np.int64)
    shared[order] = np.maximum(adjacent, np.append(adjacent[1:], 0))
    size = np.bincount(label)
    work = np.add.reduceat(index.length[order] - adjacent, np.cumsum(size) - size)
    return Sets(label[order] * count + order, adjacent, shared, size.astype(np.int64), work)


def renumbered(label: Int64) -> Int64:
    """Number the microbatches from 0 by their first member, so that equal partitions have equal labels."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[inverse], dtype=np.int64)
