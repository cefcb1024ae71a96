"""Preorder of the rows of attention views: which rows see which, as one interval a row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.backends.plan_tensors import AttentionViews
from harts.ir.base import Int64


class Preorder(NamedTuple):
    """Row i sees row j if and only if enter[j] <= enter[i] < leave[j]; C rows."""

    enter: Int64
    """Place of each row in a depth-first walk, [C]."""
    leave: Int64
    """One past the places of the rows that see it, [C]."""


def preorder(views: AttentionViews) -> Preorder:
    """Walk the rows depth-first: a row, then the branches that leave after it, then the next row of its own branch."""
    begin, end = views.cu_q[:-1], views.cu_q[1:]
    follows = rows_followed(views)
    descendants = _descendants(follows, begin, end)
    weight = np.ones(end[-1], dtype=np.int64)
    inner = follows >= 0
    np.add.at(weight, follows[inner], descendants[inner])
    walked = np.cumsum(weight) - weight
    first = _first_places(follows, begin, descendants, walked)
    own = np.diff(views.cu_q)
    enter = walked + np.repeat(first - walked[begin], own)
    return Preorder(enter, np.repeat(first + descendants, own))


def rows_followed(views: AttentionViews) -> Int64:
    """The row before the first row of each branch, -1 if it has none, [B]."""
    last = np.maximum(views.run_offset[1:] - 2, 0)  # the run before a branch's own
    return np.where(np.diff(views.run_offset) > 1, views.run_row[last] + views.run_length[last] - 1, -1)


def _descendants(follows: Int64, begin: Int64, end: Int64) -> Int64:
    """Rows of each branch and of all branches below it, [B]; a branch comes after the one it leaves."""
    found = (end - begin).tolist()
    parent = (np.searchsorted(begin, follows, side="right") - 1).tolist()
    for branch in range(len(found) - 1, -1, -1):
        if parent[branch] >= 0:
            found[parent[branch]] += found[branch]
    return np.array(found, dtype=np.int64)


def _first_places(follows: Int64, begin: Int64, descendants: Int64, walked: Int64) -> Int64:
    """Place of the first row of each branch, [B]; branches that leave after one row come in their own order."""
    found: list[int] = []
    taken: dict[int, int] = {}  # row, -1 for roots: places of branches after it that are walked already
    parent = (np.searchsorted(begin, follows, side="right") - 1).tolist()
    for row, above, rows in zip(follows.tolist(), parent, descendants.tolist(), strict=True):
        base = found[above] + int(walked[row] - walked[begin[above]]) + 1 if row >= 0 else 0
        found.append(base + taken.get(row, 0))
        taken[row] = taken.get(row, 0) + rows
    return np.array(found, dtype=np.int64)
