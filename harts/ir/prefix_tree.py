"""The compressed trie of sorted trajectories: forks and trajectory ends only, children before parents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int32, Int64


class PrefixTree(NamedTuple):
    """M nodes in postorder; the last is a root of depth 0, and every trajectory is a leaf of its own.

    The subtree of node v is v - size[v] + 1 .. v. A trajectory that ends at a fork, inside another or equal to it is a
    leaf without tokens.
    """

    end: Int64
    """Depth: tokens of the prefix that a node stands for, [M]."""
    tokens: Int64
    """Tokens of a node's own run, its end less its parent's, [M]."""
    size: Int32
    """Nodes of the subtree, [M]."""
    parent: Int32
    """-1 for the root, [M]."""
    leaf: Int32
    """Sorted position of the trajectory that ends here, -1 for a fork, [M]."""


@compiled
def prefix_tree(length: Int64, lcp: Int64) -> PrefixTree:
    """Build the tree of trajectories in sorted order, in linear time.

    Args:
        length: tokens of each, [N].
        lcp: tokens shared with the one before, which is 0 for the first, [N].
    """
    count = len(length)
    end = np.empty(2 * count, dtype=np.int64)
    tokens = np.empty(2 * count, dtype=np.int64)
    size = np.empty(2 * count, dtype=np.int32)
    parent = np.full(2 * count, -1, dtype=np.int32)
    leaf = np.full(2 * count, -1, dtype=np.int32)
    depth = np.zeros(count + 1, dtype=np.int64)  # of the open forks, root first
    first = np.zeros(count + 1, dtype=np.int64)  # node that the subtree of each begins with
    open_forks, used = 1, 0
    for i in range(count + 1):
        shared = lcp[i] if i < count else 0
        while depth[open_forks - 1] > shared or (i == count and open_forks > 0):
            open_forks -= 1
            above = depth[open_forks - 1] if open_forks > 0 else 0
            above = max(above, shared)
            end[used] = depth[open_forks]
            tokens[used] = depth[open_forks] - above
            size[used] = used - first[open_forks] + 1
            child = used - 1
            while child >= first[open_forks]:
                parent[child] = used
                child -= size[child]
            used += 1
            if open_forks > 0 and depth[open_forks - 1] < shared:  # the fork starts with what was just closed
                depth[open_forks] = shared
                open_forks += 1
                break
        if i == count:
            break
        follows = lcp[i + 1] if i + 1 < count else 0
        if follows > depth[open_forks - 1]:
            depth[open_forks] = follows
            first[open_forks] = used
            open_forks += 1
        end[used] = length[i]
        tokens[used] = length[i] - depth[open_forks - 1]
        size[used] = 1
        leaf[used] = i
        used += 1
    return PrefixTree(end[:used], tokens[:used], size[:used], parent[:used], leaf[:used])


@compiled
def least_microbatches(tree: PrefixTree, capacity: int, multiple: int) -> tuple[Int64, int]:
    """How many microbatches at least work at each node, and the volume bound that follows from it.

    Below a fork v at depth e_v at least n_v microbatches work, each of which spends e_v of its capacity T above:
    n_v = max(1, max over children c of n_c, ceil(sum W_c / (T - e_v))), and W_v = sum W_c + t_v n_v (t_v tokens) is
    the least work at and below v; the bound is W of the root. If all trajectories share their first token, its n_v is
    the number of all microbatches.

    Args:
        tree: of all trajectories, none longer than the capacity.
        capacity: T, compact tokens of a microbatch.
        multiple: what the number of microbatches is a multiple of.

    Returns:
        n_v, [M], and the bound in compact tokens.
    """
    count = len(tree.end)
    below = np.zeros(count, dtype=np.int64)
    least = np.ones(count, dtype=np.int64)
    root = count - 1
    for v in range(root):
        if below[v] > 0:
            room = capacity - tree.end[v]
            least[v] = max(least[v], (below[v] + room - 1) // room)
        if v == root - 1 and tree.size[v] == root:
            least[v] = (least[v] + multiple - 1) // multiple * multiple
        above = tree.parent[v]
        below[above] += below[v] + tree.tokens[v] * least[v]
        least[above] = max(least[above], least[v])
    return least, int(below[root])


def volume_bound(tree: PrefixTree, capacity: int, multiple: int) -> int:
    """Compact tokens that no partition into microbatches can be below; arguments as `least_microbatches`."""
    return least_microbatches(tree, capacity, multiple)[1]
