"""A partition that the search changes: microbatches with their work and cost, and the slots that they make."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64
from harts.stages.partition.search.problem import Problem, measure

COUNT, TOTAL, SLOTS = 0, 1, 2
"""Places in `State.numbers`."""


class State(NamedTuple):
    """K microbatches, whose numbers may have gaps; its arrays change in place."""

    label: Int64
    """Microbatch of each sorted position, [N]."""
    head: Int64
    """Some member of each microbatch, [N]."""
    link: Int64
    """Another member of the same microbatch, -1 at the end of the chain that begins at its head, [N]."""
    size: Int64
    """Members of each microbatch, [N]."""
    work: Int64
    """Compact tokens of each microbatch, [N]."""
    cost: Int64
    """Cost of each microbatch, [N]."""
    ranked: Int64
    """All costs, largest first; K of [N]."""
    spare: Int64
    """Numbers that no microbatch has; N - K of [N]."""
    numbers: Int64
    """K, the total cost, and `slots_cost`, [3]."""


@compiled
def begin(problem: Problem, label: Int64, count: int) -> State:
    """The state of a partition into microbatches 0..count-1, none of them empty."""
    total = len(label)
    head, link, size, work, cost, ranked, spare = np.zeros((7, total), dtype=np.int64)
    state = State(label, head, link, size, work, cost, ranked, spare, np.zeros(3, dtype=np.int64))
    relink(state, np.arange(total))
    for k in range(count):
        work[k], cost[k] = measure(problem, members(state, k))
    ranked[:count] = np.sort(cost[:count])[::-1]
    spare[: total - count] = np.arange(count, total)
    state.numbers[COUNT], state.numbers[TOTAL] = count, cost.sum()
    state.numbers[SLOTS] = slots_cost(ranked, count, problem.replicas)
    return state


@compiled
def relink(state: State, changed: Int64) -> None:
    """Chain the members of the microbatches that some positions, all of their members, are in now."""
    for x in changed:
        state.head[state.label[x]] = -1
        state.size[state.label[x]] = 0
    for x in changed:
        k = state.label[x]
        state.link[x] = state.head[k]
        state.head[k] = x
        state.size[k] += 1


@compiled
def members(state: State, microbatch: int) -> Int64:
    """Sorted positions of a microbatch, ascending, [n]."""
    found = np.empty(state.size[microbatch], dtype=np.int64)
    x = state.head[microbatch]
    for i in range(len(found)):
        found[i] = x
        x = state.link[x]
    found.sort()
    return found


@compiled
def slots_cost(ranked: Int64, count: int, replicas: int) -> int:
    """D times the sum over slots of the heaviest: blocks of D of the ranked costs; a last slot may lack some."""
    heaviest = 0
    for k in range(0, count, replicas):
        heaviest += ranked[k]
    return heaviest * replicas


@compiled
def renumber(state: State, old: Int64, count: int) -> Int64:
    """Give back the numbers of old microbatches and take others for new ones, [count]."""
    spare = len(state.label) - state.numbers[COUNT]
    for k in old:
        state.spare[spare] = k
        spare += 1
    return state.spare[spare - count : spare].copy()


@compiled
def exchanged(ranked: Int64, gone: Int64, new: Int64, out: Int64) -> int:
    """Merge new costs into ranked ones and leave out those that are gone; all largest first. Returns how many."""
    used, lost, met = 0, 0, 0
    for value in ranked:
        if lost < len(gone) and gone[lost] == value:
            lost += 1
            continue
        while met < len(new) and new[met] >= value:
            out[used] = new[met]
            met += 1
            used += 1
        out[used] = value
        used += 1
    while met < len(new):
        out[used] = new[met]
        met += 1
        used += 1
    return used
