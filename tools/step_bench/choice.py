"""Which microbatches stand for a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harts.ir import SegmentTree
from harts.ir.base import Float64
from step_bench.steps import pairs, triangles


def chosen(trees: Sequence[SegmentTree], count: int | None, replicas: int = 1) -> list[int]:
    """Slots that are together nearest to the whole step: in S / C, in how many times fewer pairs attention has, and in
    compact rows of a slot.

    The first ones of a plan would not do: they are the heaviest, single trajectories of the full capacity. Slots are
    added one by one, each the best beside those that are there, then exchanged while that brings them nearer.

    Args:
        trees: of the step, slot after slot.
        count: how many slots; None is all.
        replicas: microbatches of a slot.

    Returns:
        Their microbatches, ascending.
    """
    if count is None or count * replicas >= len(trees):
        return list(range(len(trees)))
    sizes = np.array([_sizes(tree) for tree in trees], dtype=np.float64).reshape(-1, replicas, 4).sum(1)
    slots: list[int] = []
    while len(slots) < count:
        slots.append(_best(sizes, slots)[0])
    while _exchanged(sizes, slots):
        pass
    return [slot * replicas + replica for slot in sorted(slots) for replica in range(replicas)]


def _sizes(tree: SegmentTree) -> tuple[int, int, int, int]:
    """S, C, and pairs of a query and a key that it sees: trajectory by trajectory, and shared."""
    return tree.semantic_tokens, len(tree.tokens), triangles(tree.columns.length), pairs(tree)


def _off(means: Float64, step: Float64) -> Float64:
    """Distance of some slots from all of them, of means over slots [..., 4]: in both ratios, and in rows."""
    ratio = np.log(means / step)
    apart = (ratio[..., 0] - ratio[..., 1], ratio[..., 2] - ratio[..., 3], ratio[..., 1])
    off: Float64 = np.linalg.norm(np.stack(apart), axis=0)
    return off


def _best(sizes: Float64, slots: Sequence[int]) -> tuple[int, float]:
    """The slot to add to some, and how far off they are then."""
    off = _off((sizes[list(slots)].sum(0) + sizes) / (len(slots) + 1), sizes.mean(0))
    off[list(slots)] = np.inf
    return int(off.argmin()), float(off.min())


def _exchanged(sizes: Float64, slots: list[int]) -> bool:
    """Exchange a slot for another one if that brings them nearer."""
    now = float(_off(sizes[slots].mean(0), sizes.mean(0)))
    for i, slot in enumerate(slots):
        others = slots[:i] + slots[i + 1 :]
        best, off = _best(sizes, others)
        if best != slot and off < now:
            slots[i] = best
            return True
    return False
