"""Contract the trie of some trajectories to its segments: maximal fork-free runs (SPEC section 0)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harts.ir import CompactTrie, SegmentTree
from harts.ir.base import Int64
from harts.ir.runs import expand_runs, offsets


def segment_tree(trie: CompactTrie, members: Int64) -> SegmentTree:
    """Build the segments of the trajectories at some sorted positions of a trie.

    Args:
        trie: the step's trie.
        members: sorted positions, ascending, [n].
    """
    length = trie.length[members]
    lcp = np.concatenate(([0], trie.index.neighbours(members[:-1], members[1:])))
    builder = _Builder()
    for size, shared in zip(length.tolist(), lcp.tolist(), strict=True):
        builder.add(size, shared)
    parent, start, end, tail, witness = builder.finish()
    key = trie.order[members]
    by_key = np.argsort(key)
    key = key[by_key]
    batch = trie.batch
    first = batch.columns.offset[trie.order[members[witness]]] + start
    columns = replace(batch.columns, loss_mask=trie.loss_mask).take(key)
    return SegmentTree(
        parent=parent.astype(np.int32),
        start=start,
        offset=offsets(end - start),
        tokens=batch.tokens[expand_runs(first, end - start)],
        key=key,
        tail=tail[by_key].astype(np.int32),
        columns=columns,
    )


class _Builder:
    """Insert sorted trajectories one by one; a stack holds the open nodes of the path to the last one.

    A node is a place where the trie forks or a leaf ends. Nodes are numbered as they open, and a fork found later
    splits the run above an older node; `finish` renumbers so that parents come first and children are in token order.
    """

    def __init__(self) -> None:
        self.depth: list[int] = []
        self.up: list[int] = []
        self.witness: list[int] = []
        self.ends: list[tuple[int, int]] = []  # (node below or at which the trajectory ends, its length)
        self.stack: list[int] = []
        self.count = 0

    def add(self, size: int, shared: int) -> None:
        below = -1
        while self.stack and self.depth[self.stack[-1]] > shared:
            below = self.stack.pop()
        if below < 0 and shared and self.depth[self.stack[-1]] == shared and size > shared and self._is_open_leaf():
            self._extend(size)  # the one before is a strict prefix: no fork, its last run grows
            return
        if below >= 0 and shared and (not self.stack or self.depth[self.stack[-1]] < shared):
            self._split(below, shared)
        if size > shared:
            self._open(size, self.stack[-1] if self.stack else -1)
        self.ends.append((self.stack[-1], size))
        self.count += 1

    def _is_open_leaf(self) -> bool:
        return self.stack[-1] == len(self.depth) - 1

    def _extend(self, size: int) -> None:
        leaf = self.stack[-1]
        self.depth[leaf] = size
        self.witness[leaf] = self.count
        self.ends.append((leaf, size))
        self.count += 1

    def _split(self, below: int, depth: int) -> None:
        fork = self._open(depth, self.up[below])
        self.witness[fork] = self.witness[below]
        self.up[below] = fork

    def _open(self, depth: int, up: int) -> int:
        self.depth.append(depth)
        self.up.append(up)
        self.witness.append(self.count)
        self.stack.append(len(self.depth) - 1)
        return len(self.depth) - 1

    def finish(self) -> tuple[Int64, Int64, Int64, Int64, Int64]:
        depth, up = np.array(self.depth, dtype=np.int64), np.array(self.up, dtype=np.int64)
        witness = np.array(self.witness, dtype=np.int64)
        start = np.where(up < 0, 0, depth[up])
        order = np.lexsort((start, witness))  # preorder: a node's run is first met by its witness, from the top down
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        parent = np.where(up < 0, -1, number[up])[order]
        start, end = start[order], depth[order]
        tail = np.array([number[node] for node, _ in self.ends], dtype=np.int64)
        size = np.array([length for _, length in self.ends], dtype=np.int64)
        while True:  # a fork opened later above a trajectory's end: it ends in the run above
            above = size <= start[tail]
            if not above.any():
                return parent, start, end, tail, witness[order]
            tail = np.where(above, parent[tail], tail)
