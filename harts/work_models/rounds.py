"""How many dependent rounds a microbatch needs: equations (12) to (14) on its prefix tree (SPEC section 3)."""

from __future__ import annotations

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64
from harts.ir.prefix_tree import prefix_tree


@compiled
def count_rounds(length: Int64, lcp: Int64, begins: Int64, chunk_size: int) -> Int64:
    """Rounds of the minimum-call plan of each microbatch, [K].

    Args:
        length: tokens of each trajectory, microbatch by microbatch, sorted within, [N].
        lcp: tokens shared with the one before in the same microbatch, 0 for its first, [N].
        begins: where each microbatch begins, [K].
        chunk_size: tokens of a linear-attention chunk, B.
    """
    found = np.empty(len(begins), dtype=np.int64)
    for k in range(len(begins)):
        stop = begins[k + 1] if k + 1 < len(begins) else len(length)
        found[k] = _rounds(length[begins[k] : stop], lcp[begins[k] : stop], chunk_size)
    return found


@compiled
def _rounds(length: Int64, lcp: Int64, chunk_size: int) -> int:
    """Rounds of one microbatch, children before parents.

    A node of the prefix tree is a fork of segments only if two children at least have tokens: one child that has is the
    same segment going on past the end of a shorter trajectory, and hands its numbers up.
    """
    tree = prefix_tree(length, lcp)
    count = len(tree.end)
    end = tree.end.copy()  # of the segment that a node's own run belongs to
    inner = np.ones(count, dtype=np.int64)  # T_pre if the segment ends before the first boundary past its start
    entered = np.ones(count, dtype=np.int64)  # T_in, and T_pre if it does not
    ready = np.ones(count, dtype=np.int64)
    for v in range(count):
        first, children, heir = v - tree.size[v] + 1, 0, -1
        boundary = tree.end[v] // chunk_size * chunk_size + chunk_size
        most, second = 0, 0
        u = v - 1
        while u >= first:
            if tree.tokens[u] > 0:
                children, heir = children + 1, u
                ready[u] = inner[u] if end[u] < boundary else entered[u]
                if ready[u] > most:
                    most, second = ready[u], most
                elif ready[u] > second:
                    second = ready[u]
            u -= tree.size[u]
        if children == 1:
            end[v], inner[v], entered[v] = end[heir], inner[heir], entered[heir]
        elif children > 1:
            inner[v], entered[v] = most, count
            u = v - 1
            while u >= first:
                if tree.tokens[u] > 0:
                    others = second if ready[u] == most else most
                    entered[v] = min(entered[v], max(entered[u], 1 + others))
                u -= tree.size[u]
        if v == count - 1:
            return int(most)  # the root is no segment: trees are planned apart, and the longest counts
    return 0
