"""What every view of a layout must hold, worked out token by token from the trajectories alone."""

from __future__ import annotations

import numpy as np

from harts.ir import CompactLayout
from harts.ir.base import Bool
from harts.ir.runs import expand_runs


class Paths:
    """The rows of a layout as trie nodes: each row's whole token prefix."""

    def __init__(self, layout: CompactLayout) -> None:
        tree, order = layout.plan.tree, layout.plan.segment
        tokens = [tree.tokens[a:b].tolist() for a, b in zip(tree.offset[:-1], tree.offset[1:], strict=True)]
        prefix: dict[int, tuple[int, ...]] = {-1: ()}
        for v, up in enumerate(tree.parent.tolist()):
            prefix[v] = prefix[up] + tuple(tokens[v])
        self.row: list[tuple[int, ...]] = []
        self.node: list[tuple[int, int]] = []
        for v in order.tolist():
            start = int(tree.start[v])
            self.row += [prefix[v][: start + j + 1] for j in range(len(tokens[v]))]
            self.node += [(v, start + j) for j in range(len(tokens[v]))]
        self.path_of = {node: row for row, node in enumerate(self.node)}
        self.tree = tree

    def up_to(self, segment: int, position: int) -> list[int]:
        """Rows of the positions before `position` on the path to a segment, oldest first."""
        nodes = [(v, i) for v in self.tree.path(segment) for i in range(self.tree.start[v], self.tree.end[v])]
        return [self.path_of[node] for node in nodes if node[1] < position]

    def visible(self) -> Bool:
        """Row c sees row d exactly if d is c or an ancestor of c, [C, C]."""
        seen = np.zeros((len(self.row), len(self.row)), dtype=np.bool_)
        for row, (segment, position) in enumerate(self.node):
            seen[row, self.up_to(segment, position + 1)] = True
        return seen


def seen_by_views(layout: CompactLayout) -> Bool:
    """Row c sees row d by the ancestor runs of its sequence and causally inside it, [R, R]."""
    total = len(layout.input_ids)
    seen = np.zeros((total, total), dtype=np.bool_)
    for q in range(len(layout.plan.anchor)):
        a, b = layout.ancestor_offset[q : q + 2]
        first, past = layout.cu_rows[q : q + 2]
        seen[first:past, expand_runs(layout.ancestor_row[a:b], layout.ancestor_length[a:b])] = True
        seen[first:past, first:past] = np.tri(past - first, dtype=np.bool_)
    return seen
