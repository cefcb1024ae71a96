"""Visibility of a tree's rows as intervals of their preorder, and blocks of it, both from runs; nothing is R x R."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.backends.plan_tensors import AttentionViews
from harts.ir.base import Int64
from harts.ir.runs import expand_runs, offsets


class Preorder(NamedTuple):
    """Row i sees row j if and only if enter[j] <= enter[i] < leave[j]."""

    enter: Int64
    """Number of each row in preorder; R on padding rows, [R]."""
    leave: Int64
    """One past the numbers of the rows that see it; 0 on padding rows, [R]."""


def preorder(views: AttentionViews) -> Preorder:
    """Number the rows: each row, what branches off after it, then the next row of its branch.

    Raises:
        ValueError: a branch comes before the one that it branches off from.
    """
    start, count = views.cu_q[:-1], np.diff(views.cu_q)
    fork = _forks(views)
    up = np.where(fork < 0, -1, np.searchsorted(views.cu_q, fork, side="right") - 1)
    late = np.flatnonzero(up >= np.arange(len(up)))
    if len(late):
        raise ValueError(f"branch {late[0]} follows a row of branch {up[late[0]]}; parents must come first")
    total = count.copy()
    for branch in reversed(range(len(up))):
        if up[branch] >= 0:
            total[up[branch]] += total[branch]
    side = fork >= 0
    before = offsets(np.bincount(fork[side], weights=total[side], minlength=views.rows).astype(np.int64))
    first = np.zeros(len(up), dtype=np.int64)
    taken: dict[int, int] = {}  # after each fork, -1 for roots: numbers given to branches so far
    for branch, (row, above) in enumerate(zip(fork.tolist(), up.tolist(), strict=True)):
        entered = first[above] + row - start[above] + before[row] - before[start[above]] + 1 if row >= 0 else 0
        first[branch] = entered + taken.get(row, 0)
        taken[row] = taken.get(row, 0) + int(total[branch])
    rows = int(views.cu_q[-1])
    enter, leave = np.full(views.rows, views.rows), np.zeros(views.rows, dtype=np.int64)
    enter[:rows] = np.repeat(first - start - before[start], count) + np.arange(rows) + before[:rows]
    leave[:rows] = np.repeat(first + total, count)
    return Preorder(enter, leave)


def _forks(views: AttentionViews) -> Int64:
    """Row that each branch follows, -1 for a root, [B]."""
    last = views.run_offset[1:] - 2  # the run before a branch's own
    has = np.diff(views.run_offset) > 1
    return np.where(has, views.run_row[last] + views.run_length[last] - 1, -1)


def block_pairs(views: AttentionViews, block: int) -> Int64:
    """Pairs of a query and a key that it sees in each block of queries and keys, [N, N] for N = ceil(R / block)."""
    number = -(-views.rows // block)
    edges = np.unique(np.concatenate((views.cu_q, np.arange(0, views.cu_q[-1], block))))
    low, size = edges[:-1], np.diff(edges)  # pieces: rows of one branch in one block
    branch = np.searchsorted(views.cu_q, low, side="right") - 1
    place = low // block
    found = np.bincount(place * number + place, weights=size * (size + 1) // 2, minlength=number * number)
    for piece, key, keys in (_own(branch, place, size), _ancestors(views, branch, block)):
        pair = place[piece] * number + key
        found += np.bincount(pair, weights=size[piece] * keys, minlength=number * number)
    return found.astype(np.int64).reshape(number, number)


def _own(branch: Int64, place: Int64, size: Int64) -> tuple[Int64, Int64, Int64]:
    """(piece, block, keys in it) of the pieces before each piece in its own branch."""
    first = np.searchsorted(branch, branch)
    earlier = np.arange(len(branch)) - first
    piece = np.repeat(np.arange(len(branch)), earlier)
    other = expand_runs(first, earlier)
    return piece, place[other], size[other]


def _ancestors(views: AttentionViews, branch: Int64, block: int) -> tuple[Int64, Int64, Int64]:
    """(piece, block, keys in it) of the ancestors of each piece."""
    ancestor = np.ones(len(views.run_row), dtype=np.bool_)
    ancestor[views.run_offset[1:] - 1] = False
    row, length = views.run_row[ancestor], views.run_length[ancestor]
    blocks = (row + length - 1) // block - row // block + 1
    place = expand_runs(row // block, blocks)
    low = np.maximum(np.repeat(row, blocks), place * block)
    keys = np.minimum(np.repeat(row + length, blocks), (place + 1) * block) - low
    runs = views.run_offset - np.arange(len(views.run_offset))  # of ancestors alone
    entry = offsets(blocks)[runs]
    seen = np.diff(entry)[branch]
    index = expand_runs(entry[branch], seen)
    return np.repeat(np.arange(len(branch)), seen), place[index], keys[index]
