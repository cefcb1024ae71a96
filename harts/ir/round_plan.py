"""The minimum-call plan of one microbatch: which segments run in which sequence of which round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from harts.ir.base import Dims, Int32, Int64, Invariant, Value
from harts.ir.segment_tree import SegmentTree


@dataclass(frozen=True, eq=False, repr=False)
class RoundPlan(Value):
    """Q input sequences in E rounds over the V segments of a tree, handing over P boundary states.

    Sequences are numbered round by round. A sequence starts from a state at position `anchor`, replays
    [anchor, start of its first segment) and then runs its segments.
    """

    kind = "round_plan"

    tree: SegmentTree
    chunk_size: int
    """Tokens per linear-attention chunk, B."""
    round_offset: Annotated[Int64, Dims("E+1")]
    """Sequences of round r are round_offset[r]:round_offset[r+1]."""
    sequence_offset: Annotated[Int64, Dims("Q+1")]
    """Segments of sequence i are segment[sequence_offset[i]:sequence_offset[i+1]]."""
    segment: Annotated[Int32, Dims("V")]
    anchor: Annotated[Int64, Dims("Q")]
    """Position of the initial state."""
    initial_state: Annotated[Int32, Dims("Q")]
    """Index of the state that the sequence starts from; -1 is zero."""
    state_sequence: Annotated[Int32, Dims("P")]
    """Sequence that returns each state."""
    state_position: Annotated[Int64, Dims("P")]
    """Position at which it is taken, from the trajectory's start; ascending within a sequence."""

    @property
    def rounds(self) -> int:
        """Linear-attention calls of each layer."""
        return len(self.round_offset) - 1

    @property
    def head(self) -> Int32:
        """First segment of each sequence, [Q]."""
        return self.segment[self.sequence_offset[:-1]]

    @property
    def last(self) -> Int32:
        """Last segment of each sequence, [Q]."""
        return self.segment[self.sequence_offset[1:] - 1]

    @property
    def replay(self) -> Int64:
        """Rows that each sequence replays, [Q]."""
        return self.tree.start[self.head] - self.anchor

    @property
    def sequence_round(self) -> Int64:
        """Round of each sequence, from 0, [Q]."""
        return np.repeat(np.arange(self.rounds), np.diff(self.round_offset))

    @property
    def sequence_of(self) -> Int64:
        """Sequence of each segment, [V]."""
        found = np.empty(len(self.segment), dtype=np.int64)
        found[self.segment] = np.repeat(np.arange(len(self.anchor)), np.diff(self.sequence_offset))
        return found

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        tree, count = self.tree, len(self.anchor)
        yield Invariant("chunk_size", self.chunk_size < 1, "must be at least 1")
        yield Invariant("round_offset", self.round_offset[:1] != 0, "offsets must start at 0")
        yield Invariant("round_offset", np.diff(self.round_offset) <= 0, "no round may be empty")
        yield Invariant("round_offset", self.round_offset[-1] != count, "offsets must end at the sequence count")
        yield Invariant("sequence_offset", self.sequence_offset[:1] != 0, "offsets must start at 0")
        yield Invariant("sequence_offset", np.diff(self.sequence_offset) <= 0, "no sequence may be empty")
        ends = self.sequence_offset[-1]
        yield Invariant("sequence_offset", ends != len(self.segment), "offsets must end at the segment count")
        ids = np.arange(len(self.segment))
        yield Invariant("segment", np.sort(self.segment) != ids, "every segment must run exactly once")
        inner = np.ones(len(self.segment), dtype=np.bool_)
        inner[self.sequence_offset[:-1]] = False
        before = np.concatenate(([-1], self.segment[:-1]))
        broken = inner & (tree.parent[self.segment] != before)
        yield Invariant("segment", broken, "a segment inside a sequence must follow its parent")
        yield Invariant("anchor", (self.anchor < 0) | (self.replay < 0), "must not be past the first segment")
        off_grid = (self.anchor % self.chunk_size != 0) & (self.replay > 0)
        yield Invariant("anchor", off_grid, "replay must begin on a chunk boundary")
        yield from self._states()

    def _states(self) -> Iterator[Invariant]:
        tree, source, maker = self.tree, self.initial_state, self.state_sequence
        count, position = len(self.anchor), self.state_position
        yield Invariant("initial_state", (source < -1) | (source >= len(maker)), "must be a state or -1")
        yield Invariant("initial_state", (source == -1) & (self.anchor != 0), "the zero state is at position 0")
        yield Invariant("state_sequence", (maker < 0) | (maker >= count), "must be a sequence")
        outside = (position <= self.anchor[maker]) | (position > tree.end[self.last[maker]])
        yield Invariant("state_position", outside, "a state must be taken inside the sequence that returns it")
        between = (position - self.anchor[maker]) % self.chunk_size != 0
        inside = between & (position != tree.end[self.last[maker]])
        yield Invariant("state_position", inside, "a state must be taken at a chunk boundary or a sequence's end")
        used = np.flatnonzero(source >= 0)
        made_by = maker[source[used]]
        when = self.sequence_round
        yield self._of_users(
            "initial_state", used, when[made_by] >= when[used], "a state must come from an earlier round"
        )
        elsewhere = position[source[used]] != self.anchor[used]
        yield self._of_users("initial_state", used, elsewhere, "a state must be taken at the anchor")
        strange = self._holders(used) != made_by
        yield self._of_users("initial_state", used, strange, "a state must come from the sequence's own path")

    def _of_users(self, field: str, used: Int64, broken: Any, sentence: str) -> Invariant:
        """An invariant of the sequences that start from a state, told by the sequence's own number."""
        bad = np.zeros(len(self.anchor), dtype=np.bool_)
        bad[used[broken]] = True
        return Invariant(field, bad, sentence)

    def _holders(self, sequences: Int64) -> Int64:
        """Sequence of the ancestor segment that holds the position before each anchor; -1 if no ancestor does."""
        tree = self.tree
        sequence_of = np.append(self.sequence_of, -1)  # the last entry is that of no segment, -1
        before = self.anchor[sequences] - 1
        segment = tree.parent[self.head[sequences]].astype(np.int64)
        while True:
            late = (segment >= 0) & (tree.start[segment] > before)
            if not late.any():
                return np.asarray(sequence_of[segment])
            segment[late] = tree.parent[segment[late]]
