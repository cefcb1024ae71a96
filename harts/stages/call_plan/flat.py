"""Ablation and baseline: no sharing, every trajectory is its own chain."""

from __future__ import annotations

import numpy as np

from harts.ir import RoundPlan, SegmentTree
from harts.ir.runs import expand_runs
from harts.stages.base import Stage
from harts.stages.call_plan.chunk import ChunkConfig
from harts.stages.call_plan.min_call import plan_rounds


class Flat(Stage[SegmentTree, RoundPlan]):
    """The same microbatch computed trajectory by trajectory, packed into one call."""

    Config = ChunkConfig

    def run(self, tree: SegmentTree, /) -> RoundPlan:
        """Plan one microbatch."""
        return plan_rounds(unshared(tree), self.config.chunk_size)


def unshared(tree: SegmentTree) -> SegmentTree:
    """The same trajectories and columns, each trajectory one root segment; C becomes S."""
    count = len(tree.key)
    runs = [_runs(tree, int(tail), int(length)) for tail, length in zip(tree.tail, tree.columns.length, strict=True)]
    start, length = np.array([run for path in runs for run in path], dtype=np.int64).T
    return SegmentTree(
        parent=np.full(count, -1, dtype=np.int32),
        start=np.zeros(count, dtype=np.int64),
        offset=tree.columns.offset,
        tokens=tree.tokens[expand_runs(start, length)],
        key=tree.key,
        tail=np.arange(count, dtype=np.int32),
        columns=tree.columns,
    )


def _runs(tree: SegmentTree, tail: int, length: int) -> list[tuple[int, int]]:
    """(offset, tokens) of every segment on the path of a trajectory, cut to its length."""
    return [(int(tree.offset[v]), min(int(tree.end[v]), length) - int(tree.start[v])) for v in tree.path(tail)]
