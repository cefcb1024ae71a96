"""Trie-aware greedy placement: any members may share a microbatch, and K is what comes out (SPEC section 2)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.stages.partition.bins import Policy, empty_bins, place_all
from harts.stages.partition.labels import renumbered, sets_of


@dataclass(frozen=True, eq=False)
class Placement:
    """One greedy partition."""

    order: str
    policy: str
    label: Int64
    """Microbatch of each sorted position, [N]."""
    work: int
    """Compact tokens of all microbatches."""

    @property
    def count(self) -> int:
        """K."""
        return int(self.label.max()) + 1


def best_placement(index: LcpIndex, capacity: int, multiple: int) -> Placement | None:
    """The best of 4 orders x 2 policies by (K, work); None if none has a K that is a multiple of `multiple`."""
    ways = list(product(orders(index).items(), policies(index, capacity).items()))
    with ThreadPoolExecutor() as pool:  # placing runs without the interpreter's lock
        labels = list(pool.map(lambda way: placed(index, capacity, way[0][1], way[1][1]), ways))
    best: Placement | None = None
    for ((order, _), (policy, _)), made in zip(ways, labels, strict=True):
        label = aligned(index, made, multiple)
        if label is None:
            continue
        found = Placement(order, policy, label, int(sets_of(index, label).work.sum()))
        if best is None or (found.count, found.work) < (best.count, best.work):
            best = found
    return best


def orders(index: LcpIndex) -> dict[str, Int64]:
    """Sorted positions in each processing order, [N]; ties by position."""
    ascending = np.arange(len(index))
    unique_suffix = index.length - np.maximum(index.lcp, np.append(index.lcp[1:], 0))
    return {
        "ascending": ascending,
        "descending": ascending[::-1],
        "longest_first": np.argsort(-index.length, kind="stable"),
        "rarest_first": np.argsort(-unique_suffix, kind="stable"),
    }


def policies(index: LcpIndex, capacity: int) -> dict[str, Policy]:
    """Both placement policies; each breaks its ties by the other's measure, then takes the oldest microbatch."""
    return {
        "best_fit": Policy(work=int(index.length.max()) + 1, shared=1),
        "max_shared": Policy(work=1, shared=capacity + 1),
    }


def placed(index: LcpIndex, capacity: int, positions: Int64, policy: Policy) -> Int64:
    """Place all trajectories in order, then empty microbatches that are at most half full where that is possible."""
    bins = empty_bins(index.length, index.lcp, capacity)
    place_all(bins, policy, np.ascontiguousarray(positions))
    return renumbered(bins.label)


def aligned(index: LcpIndex, label: Int64, multiple: int) -> Int64 | None:
    """Make microbatches of one trajectory until `multiple` divides K, each time the one that adds the least work.

    Ties go to the longest trajectory, which is the least bad filler of a slot. None if there are too few trajectories.
    """
    label = label.copy()
    while (count := int(label.max()) + 1) % multiple:
        sets = sets_of(index, label)
        movable = np.flatnonzero(sets.size[label] > 1)
        if len(movable) == 0:
            return None
        order = np.lexsort((-index.length[movable], sets.shared[movable]))
        label[movable[order[0]]] = count
    return renumbered(label)
