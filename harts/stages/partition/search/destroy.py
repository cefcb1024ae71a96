"""Which microbatches the next rebuild takes apart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int32, Int64
from harts.ir.prefix_tree import PrefixTree
from harts.stages.partition.search.rng import Rng, below
from harts.stages.partition.search.state import State

FEWEST, MOST = 2, 6
"""Microbatches of one rebuild."""
TRIES = 20
"""Forks looked at for one that works in more microbatches than it must."""
CLIMB = 4
"""Levels that the fork may lie above a trajectory's own."""
REACH = 64
"""Sorted positions to either side that are neighbours."""
CROWD = 64
"""Microbatches with more members are taken apart the less often the more there are: there is little to win."""
SPAN = 512
"""Trajectories below a fork that is looked at; of larger ones, some microbatches are as good as any."""


class Forks(NamedTuple):
    """Where trajectories and forks lie in the tree of all trajectories."""

    parent: Int32
    """Fork above each node, [M]."""
    first: Int64
    """First sorted position below each node, [M]."""
    last: Int64
    """Last sorted position below each node, [M]."""
    node: Int64
    """Leaf of each sorted position, [N]."""
    least: Int64
    """Microbatches that each node at least works in, [M]."""


@compiled
def forks(tree: PrefixTree, least: Int64) -> Forks:
    """Index a tree; `least` is that of `least_microbatches`."""
    count = len(tree.end)
    first = np.empty(count, dtype=np.int64)
    last = np.empty(count, dtype=np.int64)
    node = np.empty(count, dtype=np.int64)
    latest = 0
    for v in range(count):
        if tree.leaf[v] >= 0:
            latest = tree.leaf[v]
            node[latest] = v
        first[v] = tree.leaf[v - tree.size[v] + 1]  # a subtree begins with a leaf in postorder
        last[v] = latest
    return Forks(tree.parent, first, last, node[: latest + 1], least)


@compiled
def chosen(forks: Forks, state: State, seen: Int64, rng: Rng) -> Int64:
    """Some microbatches, mostly of a fork that works in more of them than its bound, else of near trajectories.

    Args:
        forks: where things lie.
        state: the partition.
        seen: marks of microbatches, larger at every call, [N + 1]; the last is the mark in use.
        rng: changed by every draw.
    """
    label, count = state.label, len(state.label)
    want = FEWEST + below(rng, MOST - FEWEST + 1)
    found = np.empty(SPAN + 2, dtype=np.int64)
    used = 0
    kind = below(rng, 10)
    if kind < 6:
        used = _of_excess(forks, label, seen, rng, found)
    elif kind < 9:
        x, span = below(rng, count), 2 + below(rng, REACH)
        used = _within(label, max(0, x - span), min(count - 1, x + span), seen, found)
    if used > want:
        for j in range(want):
            other = j + below(rng, used - j)
            found[j], found[other] = found[other], found[j]
        used = want
    extra = below(rng, 4) == 0 or kind == 9
    while extra and used <= want:
        used = _add(label[below(rng, count)], found, used)
        extra = kind == 9 and used < want and below(rng, 8) > 0
    kept = 0
    for k in found[:used]:
        if below(rng, state.size[k] * state.size[k]) < CROWD * CROWD:
            found[kept] = k
            kept += 1
    return found[:kept]


@compiled
def _of_excess(forks: Forks, label: Int64, seen: Int64, rng: Rng, found: Int64) -> int:
    for _ in range(TRIES):
        v = forks.parent[forks.node[below(rng, len(label))]]
        for _ in range(below(rng, CLIMB)):
            if forks.parent[v] >= 0:
                v = forks.parent[v]
        if forks.parent[v] >= 0 and forks.last[v] - forks.first[v] < SPAN:
            used = _within(label, forks.first[v], forks.last[v], seen, found)
            if used > forks.least[v]:
                return used
    return 0


@compiled
def _within(label: Int64, first: int, last: int, seen: Int64, found: Int64) -> int:
    """Microbatches of the sorted positions first..last, each once."""
    seen[-1] += 1
    used = 0
    for x in range(first, last + 1):
        if seen[label[x]] != seen[-1]:
            seen[label[x]] = seen[-1]
            found[used] = label[x]
            used += 1
    return used


@compiled
def _add(microbatch: int, found: Int64, used: int) -> int:
    for j in range(used):
        if found[j] == microbatch:
            return used
    found[used] = microbatch
    return used + 1
