"""Runs of ancestor rows: what a sequence's first row follows, in a round-major row order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.ir import RoundPlan
from harts.ir.base import Int64
from harts.ir.runs import expand_runs, offsets

Runs = tuple[tuple[int, int], ...]
"""(first row, rows) of each run, oldest first."""


class Place(NamedTuple):
    """Where segments and sequences lie in the row order."""

    segment_row: Int64
    """First row of each segment, [V]."""
    sequence_of: Int64
    """Sequence of each segment, [V]."""
    cu_rows: Int64
    """Own rows of each sequence, [Q + 1]."""


def place(plan: RoundPlan) -> Place:
    """Lay the sequences out one after the other; rounds are already in order."""
    length = plan.tree.length[plan.segment]
    first = offsets(length)
    segment_row = np.empty(len(length), dtype=np.int64)
    segment_row[plan.segment] = first[:-1]
    return Place(segment_row, plan.sequence_of, first[plan.sequence_offset])


def ancestor_runs(plan: RoundPlan, where: Place) -> list[Runs]:
    """Ancestor rows of each sequence: those of the sequence that it branches off, then that one's up to the fork."""
    tree = plan.tree
    head, stop = plan.head, where.segment_row + tree.length
    found: list[Runs] = [()] * len(head)
    for i in np.argsort(head).tolist():  # segments come parents first, so a sequence's parent is done before it
        up = int(tree.parent[head[i]])
        if up >= 0:
            source = int(where.sequence_of[up])
            begin = int(where.cu_rows[source])
            found[i] = joined(found[source], begin, int(stop[up]) - begin)
    return found


def joined(runs: Runs, row: int, length: int) -> Runs:
    """Append a run; one that goes on where the last one ends is one with it."""
    if runs and runs[-1][0] + runs[-1][1] == row:
        return (*runs[:-1], (runs[-1][0], runs[-1][1] + length))
    return (*runs, (row, length))


def last_rows(runs: Runs, count: int) -> Runs:
    """Cut runs to their last `count` rows, or fewer if there are fewer."""
    kept: list[tuple[int, int]] = []
    for row, length in reversed(runs):
        if count <= 0:
            break
        taken = min(count, length)
        kept.append((row + length - taken, taken))
        count -= taken
    return tuple(reversed(kept))


class Ragged(NamedTuple):
    """Runs of many owners, flat."""

    offset: Int64
    row: Int64
    length: Int64

    def rows(self) -> Int64:
        """All rows, expanded."""
        return expand_runs(self.row, self.length)


def ragged(owners: list[Runs]) -> Ragged:
    """Flatten the runs of each owner."""
    flat = np.array([run for runs in owners for run in runs], dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(runs) for runs in owners], dtype=np.int64)
    return Ragged(offsets(counts), np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1]))
