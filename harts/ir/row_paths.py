"""Do runs of rows follow true paths of the tree? Checked run by run, whatever number of rows they stand for."""

from __future__ import annotations

import numpy as np

from harts.ir.base import Bool, Int64
from harts.ir.round_plan import RoundPlan
from harts.ir.runs import offsets


def expected_rows(plan: RoundPlan) -> tuple[Int64, Int64]:
    """(first row of each segment [V], own rows of each sequence [Q + 1]) of the round-major order."""
    first = offsets(plan.tree.length[plan.segment])
    segment_row = np.empty(len(plan.segment), dtype=np.int64)
    segment_row[plan.segment] = first[:-1]
    return segment_row, first[plan.sequence_offset]


def previous_rows(plan: RoundPlan, segment_row: Int64) -> Int64:
    """Row of the token before each row's token on its path; -1 at position 0, [C]."""
    tree = plan.tree
    before = np.arange(-1, len(tree.tokens) - 1, dtype=np.int64)
    last = segment_row + tree.length - 1
    before[segment_row] = np.where(tree.parent < 0, -1, last[tree.parent])
    return before


def off_path(before: Int64, offset: Int64, row: Int64, length: Int64, last: Int64) -> Bool:
    """Which owners' runs are not exactly the path from position 0 to their last row.

    Args:
        before: of `previous_rows`, [C].
        offset: runs of owner i are offset[i]:offset[i+1], [N + 1].
        row: first row of each run, in range, [M].
        length: rows of each run, at least 1, in range, [M].
        last: the row that each owner's path ends with; -1 is no path, [N].

    Returns:
        [N].
    """
    jumps = np.concatenate(([0], np.cumsum(before != np.arange(-1, len(before) - 1))))
    bad_run = jumps[row + length] != jumps[row + 1]  # a run goes on where the path does not
    owner = np.repeat(np.arange(len(last)), np.diff(offset))
    is_first = np.ones(len(row), dtype=np.bool_)
    is_first[1:] = owner[1:] != owner[:-1]
    stop = row + length - 1
    follows = np.where(is_first, -1, np.roll(stop, 1))
    bad_run |= before[row] != follows
    broken = np.zeros(len(last), dtype=np.bool_)
    broken[owner[bad_run]] = True
    end = np.full(len(last), -1, dtype=np.int64)
    some = np.diff(offset) > 0
    end[some] = stop[offset[1:][some] - 1]
    return np.asarray(broken | (end != last))
