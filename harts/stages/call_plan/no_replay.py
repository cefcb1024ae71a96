"""Ablation: every segment starts from its parent's final state, wherever that is in a chunk."""

from __future__ import annotations

from harts.ir import RoundPlan, SegmentTree
from harts.stages.base import Stage
from harts.stages.call_plan.chunk import ChunkConfig
from harts.stages.call_plan.sequences import ZERO_STATE, Sequences


class NoReplay(Stage[SegmentTree, RoundPlan]):
    """One sequence a segment, no replay: equal in exact arithmetic, but the chunk grid restarts at every fork."""

    Config = ChunkConfig

    def run(self, tree: SegmentTree, /) -> RoundPlan:
        """Plan one microbatch; the rounds are the depths of the tree."""
        sequences = Sequences(tree, self.config.chunk_size)
        for v, (up, start) in enumerate(zip(tree.parent.tolist(), tree.start.tolist(), strict=True)):
            source = sequences.state(up, start) if up >= 0 else ZERO_STATE
            number = sequences.start(sequences.made[up].round + 1 if up >= 0 else 0, start, source)
            sequences.made[number].segments.append(v)  # sequence v is segment v: parents come first
        return sequences.plan()
