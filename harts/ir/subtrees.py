"""Sums over the subtrees of a forest that is written as the parent of each node."""

from __future__ import annotations

import numpy as np

from harts.ir.base import Int32, Int64


def subtree_sums(parent: Int32 | Int64, own: Int64) -> Int64:
    """What each node and all nodes below it have together.

    Args:
        parent: of each node, which comes before it, [V]; negative for roots.
        own: what each node has, [V].

    Returns:
        The sums, [V].
    """
    found = own.tolist()
    parents = parent.tolist()
    for node in range(len(found) - 1, -1, -1):
        if parents[node] >= 0:
            found[parents[node]] += found[node]
    return np.array(found, dtype=np.int64)
