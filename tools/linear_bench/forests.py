"""Segment trees made from (parent, length) pairs: the synthetic workloads, and scaled copies of any tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harts.ir import Columns, SegmentTree
from harts.ir.base import Int64
from harts.ir.runs import offsets

CHUNK = 64
"""Tokens a chunk: what the kernels of both rules take."""


def forest(parent: Sequence[int], length: Sequence[int], ends: Sequence[tuple[int, int]] = ()) -> SegmentTree:
    """A tree of segments whose tokens are dummies that tell siblings apart.

    Args:
        parent: of each segment, parents first, -1 is none, [V].
        length: tokens of each segment, [V].
        ends: (segment, tokens used of it) of each trajectory; without any, one trajectory ends at each leaf.
    """
    up, size = np.array(parent, dtype=np.int32), np.array(length, dtype=np.int64)
    start = np.zeros(len(up), dtype=np.int64)
    rank = np.zeros(len(up), dtype=np.int32)
    born: dict[int, int] = {}
    for v, above in enumerate(up.tolist()):
        start[v] = start[above] + size[above] if above >= 0 else 0
        rank[v] = born[above] = born.get(above, 0) + 1
    leaves = np.setdiff1d(np.arange(len(up)), up)
    tail = np.array([v for v, _ in ends] or leaves, dtype=np.int32)
    used = np.array([n for _, n in ends] or size[leaves], dtype=np.int64)
    offset = offsets(size)
    tokens = np.zeros(int(offset[-1]), dtype=np.int32)
    tokens[offset[:-1]] = rank
    return SegmentTree(up, start, offset, tokens, np.arange(len(tail)), tail, _columns(start[tail] + used))


def scaled(tree: SegmentTree, scale: float) -> SegmentTree:
    """The same shape with every segment's length times `scale`, one token at least."""
    length = np.maximum(1, np.rint(tree.length * scale)).astype(np.int64)
    used = tree.columns.length - tree.start[tree.tail]
    short = np.clip(np.rint(used * scale), 1, length[tree.tail]).astype(np.int64)
    short = np.where(used == tree.length[tree.tail], length[tree.tail], short)
    return forest(tree.parent.tolist(), length.tolist(), list(zip(tree.tail.tolist(), short.tolist(), strict=True)))


def random_forest(seed: int, scale: float) -> SegmentTree:
    """Forks inside chunks, on boundaries, beside them; one-token segments; strict prefixes of other trajectories."""
    rng = np.random.default_rng([seed, 1])
    parent, length, end = [-1] * 6, [], []
    for _ in parent:
        length.append(_length(rng, 0, scale))
    end, open_ends = list(length), list(range(6))
    for _ in range(max(4, round(60 * scale))):
        fork = open_ends.pop(int(rng.integers(len(open_ends))))
        for _ in range(int(rng.integers(2, 5))):
            open_ends.append(len(parent))
            parent.append(fork)
            length.append(_length(rng, end[fork], scale))
            end.append(end[fork] + length[-1])
    prefixes = rng.choice(len(parent), size=5, replace=False).tolist()
    ends = [(v, length[v]) for v in open_ends] + [(v, int(rng.integers(1, length[v] + 1))) for v in prefixes]
    return forest(parent, length, ends)


def _length(rng: np.random.Generator, start: int, scale: float) -> int:
    """A new segment's tokens: one, a few, many, or up to a chunk boundary, the token before it or after it."""
    kind = int(rng.integers(6))
    if kind == 0:
        return 1
    if kind == 1:
        return int(rng.integers(1, CHUNK))
    if kind == 2:
        return int(rng.integers(CHUNK, CHUNK + max(2, round(2_000 * scale))))
    return CHUNK - start % CHUNK + CHUNK * int(rng.integers(1, 3)) + kind - 4


def sand(scale: float) -> SegmentTree:
    """Three prompts that end after 1, 36 and 63 tokens of a chunk, with a thousand one-token branches each."""
    prompts, branches = [65, 100, 127], max(2, round(1_000 * scale))
    parent = [-1, -1, -1, *np.repeat(np.arange(3), branches).tolist()]
    return forest(parent, prompts + [1] * (3 * branches))


def _columns(length: Int64) -> Columns:
    names = tuple(f"t{i}" for i in range(len(length)))
    offset = offsets(length)
    return Columns(names, ("g",), offset, np.zeros(len(length), dtype=np.int32), np.ones(int(offset[-1]), np.bool_))
