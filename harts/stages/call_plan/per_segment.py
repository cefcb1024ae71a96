"""Ablation: every segment is an input sequence of its own."""

from __future__ import annotations

from harts.ir import RoundPlan, SegmentTree
from harts.stages.base import Stage
from harts.stages.call_plan.chunk import ChunkConfig
from harts.stages.call_plan.sequences import ZERO_STATE, Sequences


class PerSegment(Stage[SegmentTree, RoundPlan]):
    """One sequence a segment, replay-prefixed, each in the earliest round in which its state exists."""

    Config = ChunkConfig

    def run(self, tree: SegmentTree, /) -> RoundPlan:
        """Plan one microbatch."""
        chunk = self.config.chunk_size
        sequences = Sequences(tree, chunk)
        start, parent = tree.start.tolist(), tree.parent.tolist()
        for v, up in enumerate(parent):  # sequence v is segment v: parents come first
            anchor = start[v] // chunk * chunk
            source = sequences.state(up, anchor) if up >= 0 else ZERO_STATE
            number = sequences.start(_round(sequences, up, anchor), anchor, source)
            sequences.made[number].segments.append(v)
        return sequences.plan()


def _round(sequences: Sequences, parent: int, anchor: int) -> int:
    """The parent's round if it starts from the same state, else the one after it."""
    if parent < 0 or anchor == 0:
        return 0
    made = sequences.made[parent]
    return made.round if made.anchor == anchor else made.round + 1
