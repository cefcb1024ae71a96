"""One physical order of the compact rows for the whole model, and every view that a layer takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from harts.ir.base import Dims, Int32, Int64, Invariant, Value
from harts.ir.round_plan import RoundPlan
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
        tree, plan = self.plan.tree, self.plan
        yield Invariant("rows", self.rows != len(tree.tokens), "must be the tree's token count")
        yield Invariant("cu_rows", self.cu_rows[:1] != 0, "offsets must start at 0")
        yield Invariant("cu_rows", np.diff(self.cu_rows) <= 0, "no sequence may be without rows")
        yield Invariant("cu_rows", self.cu_rows[-1] != self.rows, "offsets must end at the row count")
        total = int(self.multiplicity.sum())
        yield Invariant("multiplicity", total != tree.semantic_tokens, "must add up to the semantic tokens")
        real = np.arange(len(self.multiplicity)) < self.rows
        yield Invariant("multiplicity", (self.multiplicity > 0) != real, "must be positive on tokens, 0 on padding")
        yield Invariant("replay_row", np.diff(self.replay_offset) != plan.replay, "must replay what the plan says")
        views = ((self.replay_row, "replay_row"), (self.ancestor_row, "ancestor_row"))
        for view, name in views:
            yield Invariant(name, (view < 0) | (view >= self.rows), "must be a token's row")
        past = (self.context_row < -1) | (self.context_row >= self.rows)
        yield Invariant("context_row", past.any(axis=1), "must be a token's row or -1")
        first = tree.start[plan.head]
        seen = np.add.reduceat(np.append(self.ancestor_length, 0), self.ancestor_offset[:-1])
        seen = np.where(np.diff(self.ancestor_offset) == 0, 0, seen)
        yield Invariant("ancestor_length", seen != first, "must cover every position before the sequence")
        mapped = self.semantic_map.rows()
        yield Invariant("semantic_map", (mapped < 0) | (mapped >= self.rows), "must map to tokens' rows")
        wanted = np.concatenate([np.arange(n) for n in tree.columns.length])
        wrong = self.position_ids[mapped] != wanted
        yield Invariant("semantic_map", wrong, "a position must map to a row of the same position")
        counted = np.bincount(mapped, minlength=len(self.multiplicity))
        yield Invariant("multiplicity", counted != self.multiplicity, "must count the semantic positions of the row")
