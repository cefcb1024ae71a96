"""Layouts made by hand: segments in any physical order, optional padding rows, nothing of the planner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harts.ir import CompactLayout, RoundPlan, SegmentTree, SemanticMap
from harts.ir.base import Int64
from harts.ir.runs import expand_runs, offsets


def layout_of(tree: SegmentTree, order: Sequence[int] | None = None, padding: int = 0) -> CompactLayout:
    """Rows segment after segment in `order` (of the tree if None), each segment a sequence of its own."""
    count = len(tree.parent)
    segment = np.array(range(count) if order is None else order, dtype=np.int64)
    cu = offsets(tree.length[segment])
    segment_row = np.empty(count, dtype=np.int64)
    segment_row[segment] = cu[:-1]
    owner = expand_runs(tree.offset[:-1][segment], tree.length[segment])
    semantic_map = map_of(tree, segment_row)
    zeros, none = np.zeros(padding, dtype=np.int64), np.zeros(0, dtype=np.int64)
    position = expand_runs(tree.start[segment], tree.length[segment])
    multiplicity = np.bincount(semantic_map.rows(), minlength=len(owner) + padding)
    plan = RoundPlan(
        tree=tree,
        chunk_size=4,
        round_offset=np.array([0, count], dtype=np.int64),
        sequence_offset=np.arange(count + 1),
        segment=segment.astype(np.int32),
        anchor=np.zeros(count, dtype=np.int64),
        initial_state=np.full(count, -1, dtype=np.int32),
        state_sequence=np.zeros(0, dtype=np.int32),
        state_position=none,
    )
    return CompactLayout(
        plan=plan,
        semantic_map=semantic_map,
        rows=len(owner),
        input_ids=np.concatenate((tree.tokens[owner], zeros)).astype(np.int32),
        position_ids=np.concatenate((position, zeros)),
        multiplicity=multiplicity.astype(np.int64),
        segment_row=segment_row,
        cu_rows=cu,
        replay_offset=np.zeros(count + 1, dtype=np.int64),
        replay_row=none,
        context_row=np.full((count, 3), -1, dtype=np.int64),
        ancestor_offset=np.zeros(count + 1, dtype=np.int64),
        ancestor_row=none,
        ancestor_length=none,
    )


def map_of(tree: SegmentTree, segment_row: Int64) -> SemanticMap:
    runs: list[tuple[int, int]] = []
    counts = []
    for tail, size in zip(tree.tail.tolist(), tree.columns.length.tolist(), strict=True):
        path = tree.path(tail)
        runs += [(int(segment_row[v]), int(min(tree.end[v], size) - tree.start[v])) for v in path]
        counts.append(len(path))
    first, length = np.array(runs, dtype=np.int64).T
    return SemanticMap(offsets(np.array(counts, dtype=np.int64)), first.copy(), length.copy())


def flat_tree(tree: SegmentTree) -> SegmentTree:
    """The same trajectories, each its own chain."""
    rows = map_of(tree, tree.offset[:-1]).rows()
    count = len(tree.columns)
    return SegmentTree(
        parent=np.full(count, -1, dtype=np.int32),
        start=np.zeros(count, dtype=np.int64),
        offset=tree.columns.offset,
        tokens=tree.tokens[rows],
        key=tree.key,
        tail=np.arange(count, dtype=np.int32),
        columns=tree.columns,
    )
