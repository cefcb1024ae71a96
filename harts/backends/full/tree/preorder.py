"""Preorder of the rows of attention views: which rows see which, as one interval a row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.backends.plan_tensors import AttentionViews
from harts.ir.base import Int64
from harts.ir.subtrees import subtree_sums


class Preorder(NamedTuple):
    """Row i sees row j if and only if enter[j] <= enter[i] < leave[j]; C rows."""

    enter: Int64
    """Place of each row in a depth-first walk, [C]."""
    leave: Int64
    """One past the places of the rows that see it, [C]."""


def preorder(views: AttentionViews) -> Preorder:
    """Walk the rows depth-first: a row, then the branches that leave after it, then the next row of its own branch."""
    begin, own = views.cu_q[:-1], np.diff(views.cu_q)
    follows = rows_followed(views)
    parent = np.searchsorted(begin, follows, side="right") - 1
    descendants = subtree_sums(parent, own)
    weight = np.ones(views.cu_q[-1], dtype=np.int64)
    inner = follows >= 0
    np.add.at(weight, follows[inner], descendants[inner])
    walked = np.cumsum(weight) - weight
    within = walked - np.repeat(walked[begin], own)
    first = _first_places(follows, parent, descendants, within)
    return Preorder(within + np.repeat(first, own), np.repeat(first + descendants, own))


def rows_followed(views: AttentionViews) -> Int64:
    """The row before the first row of each branch, -1 if it has none, [B]."""
    last = np.maximum(views.run_offset[1:] - 2, 0)  # the run before a branch's own
    return np.where(np.diff(views.run_offset) > 1, views.run_row[last] + views.run_length[last] - 1, -1)


def _first_places(follows: Int64, parent: Int64, descendants: Int64, within: Int64) -> Int64:
    """Place of the first row of each branch, [B]; branches that leave after one row come in their own order.

    Args:
        follows: by `rows_followed`, [B].
        parent: the branch of that row, -1 if there is none, [B].
        descendants: rows of each branch and of all branches below it, [B].
        within: places of each row after the first one of its branch, [C].
    """
    found: list[int] = []
    taken: dict[int, int] = {}  # row, -1 for roots: places of branches after it that are walked already
    for row, above, rows in zip(follows.tolist(), parent.tolist(), descendants.tolist(), strict=True):
        base = found[above] + int(within[row]) + 1 if row >= 0 else 0
        found.append(base + taken.get(row, 0))
        taken[row] = taken.get(row, 0) + rows
    return np.array(found, dtype=np.int64)
