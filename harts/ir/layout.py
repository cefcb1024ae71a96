"""One physical order of the compact rows for the whole model, and every view that a layer takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from harts.ir.base import Dims, Int32, Int64, Invariant, Value
from harts.ir.round_plan import RoundPlan
from harts.ir.row_paths import expected_rows, off_path, previous_rows
from harts.ir.runs import expand_runs
from harts.ir.semantic_map import SemanticMap


@dataclass(frozen=True, eq=False, repr=False)
class CompactLayout(Value):
    """R rows: C compact tokens in round-major order, then padding rows that nobody owns.

    Rows of an input sequence are contiguous, sequences of a round are contiguous. Q sequences, E rounds, P states.
    """

    kind = "compact_layout"

    plan: RoundPlan
    semantic_map: SemanticMap
    rows: int
    """C, the rows that are tokens."""
    input_ids: Annotated[Int32, Dims("R")]
    """Token of each row; 0 on padding."""
    position_ids: Annotated[Int64, Dims("R")]
    """Position in the token's trajectories; 0 on padding."""
    multiplicity: Annotated[Int64, Dims("R")]
    """Semantic positions of each row, q_c; 0 on padding."""
    segment_row: Annotated[Int64, Dims("V")]
    """First row of each segment."""
    cu_rows: Annotated[Int64, Dims("Q+1")]
    """Own rows of sequence i are cu_rows[i]:cu_rows[i+1]."""
    replay_offset: Annotated[Int64, Dims("Q+1")]
    """Replay rows of sequence i are replay_row[replay_offset[i]:replay_offset[i+1]]."""
    replay_row: Annotated[Int64, Dims("Y")]
    """Compact rows to replay, true ancestors in order."""
    context_row: Annotated[Int64, Dims("Q", "X")]
    """Conv context: the last w - 1 true ancestor rows before each sequence's own rows, oldest first; -1 is zero."""
    ancestor_offset: Annotated[Int64, Dims("Q+1")]
    """Ancestor runs of sequence i are ancestor_offset[i]:ancestor_offset[i+1]."""
    ancestor_row: Annotated[Int64, Dims("A")]
    """First row of each run of rows that the sequence's queries see besides its own."""
    ancestor_length: Annotated[Int64, Dims("A")]

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield from self._sizes()
        yield from self._tokens()
        before = previous_rows(self.plan, self.segment_row)
        entry = before[self.cu_rows[:-1]]
        yield from self._replay(before, entry)
        yield from self._context(before, entry)
        yield from self._ancestors(before, entry)
        yield from self._map(before)

    def _sizes(self) -> Iterator[Invariant]:
        yield Invariant("rows", self.rows != len(self.plan.tree.tokens), "must be the tree's token count")
        yield Invariant("input_ids", len(self.input_ids) < self.rows, "there must be at least one row a token")
        for name, flat in (("replay_offset", self.replay_row), ("ancestor_offset", self.ancestor_row)):
            offset = getattr(self, name)
            yield Invariant(name, offset[:1] != 0, "offsets must start at 0")
            yield Invariant(name, np.diff(offset) < 0, "offsets must not descend")
            yield Invariant(name, offset[-1] != len(flat), "offsets must end at the entry count")

    def _tokens(self) -> Iterator[Invariant]:
        """Rows are the plan's, in its order."""
        tree, order = self.plan.tree, self.plan.segment
        segment_row, cu_rows = expected_rows(self.plan)
        yield Invariant("cu_rows", self.cu_rows != cu_rows, "must be where the plan's sequences begin")
        yield Invariant("segment_row", self.segment_row != segment_row, "must be where the plan's segments begin")
        tokens = tree.tokens[expand_runs(tree.offset[order], tree.length[order])]
        yield Invariant("input_ids", self.input_ids[: self.rows] != tokens, "must be the tree's token")
        positions = expand_runs(tree.start[order], tree.length[order])
        yield Invariant("position_ids", self.position_ids[: self.rows] != positions, "must be the tree's position")

    def _replay(self, before: Int64, entry: Int64) -> Iterator[Invariant]:
        rows, count = self.replay_row, np.diff(self.replay_offset)
        yield Invariant("replay_row", (rows < 0) | (rows >= self.rows), "must be a token's row")
        yield Invariant("replay_offset", count != self.plan.replay, "must replay what the plan says")
        follows = np.append(rows[1:], -1)
        some = count > 0
        wanted = before[follows]
        wanted[self.replay_offset[1:][some] - 1] = entry[some]
        yield Invariant("replay_row", rows != wanted, "must be the true ancestor before the next row")

    def _context(self, before: Int64, entry: Int64) -> Iterator[Invariant]:
        rows = self.context_row
        past = (rows < -1) | (rows >= self.rows)
        yield Invariant("context_row", past.any(axis=1), "must be a token's row or -1")
        wanted, row = np.empty_like(rows), entry
        for column in reversed(range(rows.shape[1])):
            wanted[:, column] = row
            row = np.where(row < 0, -1, before[row])
        wrong = (rows != wanted).any(axis=1)
        yield Invariant("context_row", wrong, "must be the last true ancestors, oldest first")

    def _ancestors(self, before: Int64, entry: Int64) -> Iterator[Invariant]:
        row, length = self.ancestor_row, self.ancestor_length
        yield Invariant("ancestor_row", (row < 0) | (row >= self.rows), "must be a token's row")
        yield Invariant("ancestor_length", (length < 1) | (row + length > self.rows), "must stay inside the rows")
        wrong = off_path(before, self.ancestor_offset, row, length, entry)
        yield Invariant("ancestor_row", wrong, "must be the sequence's whole path before its own rows")

    def _map(self, before: Int64) -> Iterator[Invariant]:
        yield from self.semantic_map.invariants()
        tree, mapped = self.plan.tree, self.semantic_map
        row, length = mapped.run_row, mapped.run_length
        yield Invariant("semantic_map", row + length > self.rows, "must map to tokens' rows")
        yield Invariant("semantic_map", len(mapped.run_offset) != len(tree.key) + 1, "must map every trajectory")
        last = self.segment_row[tree.tail] + tree.columns.length - 1 - tree.start[tree.tail]
        wrong = off_path(before, mapped.run_offset, row, length, last)
        yield Invariant("semantic_map", wrong, "must map each trajectory to its path")
        total = len(self.multiplicity)
        step = np.bincount(row, minlength=total + 1) - np.bincount(row + length, minlength=total + 1)
        counted = np.cumsum(step)[:total]
        yield Invariant("multiplicity", counted != self.multiplicity, "must count the semantic positions of the row")
