"""Segment trees made directly from (parent, tokens) pairs: segments keep their numbers."""

from __future__ import annotations

import numpy as np

from harts.ir import Columns, SegmentTree
from harts.ir.base import Int64
from harts.ir.runs import offsets
from tests.forests import Spec


def direct_tree(spec: Spec, leaves_kept: int | None = None) -> SegmentTree:
    """One trajectory for each leaf. Tokens are dummies; planning reads segments only.

    `leaves_kept` leaves all but some trajectories out: those of a deep tree would hold billions of tokens. Such a
    tree does not verify.
    """
    parent = np.array([up for up, _ in spec], dtype=np.int32)
    length = np.array([tokens for _, tokens in spec], dtype=np.int64)
    start = np.zeros(len(spec), dtype=np.int64)
    for v, (up, _) in enumerate(spec):
        if up >= 0:
            start[v] = start[up] + length[up]
    leaf = np.setdiff1d(np.arange(len(spec)), parent)[:leaves_kept]
    return SegmentTree(
        parent=parent,
        start=start,
        offset=offsets(length),
        tokens=np.repeat(np.arange(len(length)), length).astype(np.int32),
        key=np.arange(len(leaf)),
        tail=leaf.astype(np.int32),
        columns=_columns((start + length)[leaf]),
    )


def _columns(length: Int64) -> Columns:
    names = tuple(f"t{i}" for i in range(len(length)))
    offset = offsets(length)
    mask = np.ones(int(offset[-1]), dtype=np.bool_)
    return Columns(names, ("g",), offset, np.zeros(len(length), dtype=np.int32), mask)


def caterpillar(depth: int, tokens: int, spine_first: bool) -> list[tuple[int, int]]:
    """A spine that forks `depth` times into itself and a one-token leaf: 2 * depth + 1 segments."""
    spec, spine = [(-1, tokens)], 0
    for _ in range(depth):
        born = len(spec)
        spec += [(spine, tokens), (spine, 1)] if spine_first else [(spine, 1), (spine, tokens)]
        spine = born if spine_first else born + 1
    return spec
