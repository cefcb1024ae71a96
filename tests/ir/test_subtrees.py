"""Sums over subtrees."""

from __future__ import annotations

import random

import numpy as np

from harts.ir.subtrees import subtree_sums


def test_sums_are_those_of_the_nodes_below() -> None:
    rng = random.Random(0)
    for nodes in (0, 1, 2, 40):
        parent = [rng.randrange(-1, node) if node else -1 for node in range(nodes)]
        own = [rng.randrange(10) for _ in range(nodes)]
        wanted = list(own)
        for node in range(nodes):
            above = parent[node]
            while above >= 0:
                wanted[above] += own[node]
                above = parent[above]
        given = np.array(own, dtype=np.int64)
        found = subtree_sums(np.array(parent, dtype=np.int32), given)
        assert found.dtype == np.int64
        assert found.tolist() == wanted
        assert given.tolist() == own
